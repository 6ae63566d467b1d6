//! Objects of one node, beside a dict from name to the put that is there.

use std::collections::{BTreeMap, BTreeSet};

use pyengine_transfer::messages::{LocalEvent, LocalRequest, Refusal};
use pyengine_transfer::objects::messages::{At, ObjectEvent, ObjectRequest, Reserved, Wanted};
use pyengine_transfer::objects::reader::{Answer, Reader};
use pyengine_transfer::types::{BlockKey, ClientId};

use crate::blocks::ROOT;
use crate::model::Model;

/// Classes of blocks, by number: 4 KiB, and twice that. (The engine does not mind a value that is cut into small ones.)
pub const CLASSES: [u8; 2] = [0, 1];
const NAMES: u64 = 6;
/// Clients of objects on each node.
const CLIENTS: u64 = 2;

/// What is written, or was, under one name.
#[derive(Clone, Debug)]
struct Put {
    client: ClientId,
    number: u64,
    name: u8,
    blocks: u32,
}

/// A block that somebody reads.
#[derive(Clone, Debug)]
struct View {
    client: ClientId,
    pin: u64,
    at: At,
    put: u64,
    name: u8,
}

#[derive(Debug, Default)]
pub struct Objects {
    readers: BTreeMap<ClientId, Reader>,
    dict: BTreeMap<u8, Put>,
    open: Vec<Put>,
    views: Vec<View>,
}

fn name_key(name: u8) -> BlockKey {
    BlockKey([0xa0 + name; 16])
}

/// Puts are numbered over all nodes and lives, so that no two of these are the same.
fn chunk_key(put: u64, index: u32) -> BlockKey {
    let mut key = [0xee; 16];
    key[..8].copy_from_slice(&put.to_le_bytes());
    key[8..12].copy_from_slice(&index.to_le_bytes());
    BlockKey(key)
}

fn block_key(put: &Put, index: u32) -> BlockKey {
    if index == 0 { name_key(put.name) } else { chunk_key(put.number, index) }
}

impl Model {
    fn objects(&mut self, node: &str) -> &mut Objects {
        self.objects.get_mut(node).expect("each node has some")
    }

    /// A node has begun.
    pub fn begin_objects(&mut self, node: &str) {
        for _ in 0..CLIENTS {
            let client = self.client();
            let catalog = self.engine(node).catalog().clone();
            self.objects(node).readers.insert(client, Reader::new(catalog));
        }
    }

    /// All clients of objects let go of everything.
    pub fn end_objects(&mut self, node: &str) {
        for client in self.objects(node).readers.keys().copied().collect::<Vec<_>>() {
            self.object_client_dies(node, client);
        }
    }

    fn ask_objects(&mut self, node: &str, client: ClientId, request: ObjectRequest) -> Option<ObjectEvent> {
        let reader = self.objects(node).readers.get_mut(&client).expect("it lives");
        let request = match reader.answer(request) {
            Answer::Pass(request) => LocalRequest::Objects(request),
            Answer::Tell(event, _) => return Some(event),
            Answer::Done => return None,
        };
        // What was told before is nobody's answer.
        self.handle_events();
        self.world.request(node, client, request);
        let (mut answers, others): (Vec<_>, Vec<_>) =
            self.world.take_events().into_iter().partition(|(_, told, _)| *told == client);
        self.take_reports();
        others.into_iter().for_each(|(node, client, event)| self.told(&node, client, event));
        assert!(answers.len() <= 1, "{answers:?}");
        match answers.pop() {
            Some((_, _, LocalEvent::Objects(event))) => Some(event),
            None => None,
            other => panic!("{other:?}"),
        }
    }

    pub fn act_on_objects(&mut self, node: &str) {
        let clients: Vec<ClientId> = self.objects(node).readers.keys().copied().collect();
        let client = self.pick(&clients);
        match self.random.below(100) {
            0..32 => self.begin_put(node, client),
            32..56 => self.finish_put(node),
            56..78 => self.view(node, client),
            78..88 => self.close_view(node),
            88..93 => self.remove_object(node, client),
            93..97 => self.abandon_put(node),
            _ => self.object_client_dies(node, client),
        }
    }

    fn begin_put(&mut self, node: &str, client: ClientId) {
        let (number, name) = (self.tag().request, self.random.below(NAMES) as u8);
        let blocks = if self.random.permille(600) { 1 } else { 2 + self.random.below(3) as u32 };
        let class = self.pick(&CLASSES);
        let put = Put { client, number, name, blocks };
        let there = self.has_object(node, &name_key(name));
        for index in 0..blocks {
            let (key, parent) = (block_key(&put, index), if index == 0 { ROOT } else { block_key(&put, index - 1) });
            let wanted = vec![Wanted { put: number, class, key, parent, index }];
            let answer = self.ask_objects(node, client, ObjectRequest::Reserve { ticket: 1, wanted });
            let Some(ObjectEvent::Reserved { blocks, .. }) = answer else { panic!("{answer:?}") };
            match blocks[0] {
                Reserved::Slot { region, slot } => {
                    assert!(index > 0 || !there);
                    self.stamp(node, (region, slot), number);
                }
                Reserved::There => {
                    assert!(index == 0 && there);
                    return;
                }
                Reserved::Refused(Refusal::Full) => {
                    self.ask_objects(node, client, ObjectRequest::Abandon { puts: vec![number] });
                    return;
                }
                Reserved::Refused(other) => panic!("{other:?}"),
            }
        }
        self.objects(node).open.push(put);
    }

    fn take_open(&mut self, node: &str) -> Option<Put> {
        let count = self.objects(node).open.len();
        let at = (count > 0).then(|| self.random.below(count as u64) as usize)?;
        Some(self.objects(node).open.swap_remove(at))
    }

    fn commit(&mut self, node: &str, put: &Put, index: u32) -> bool {
        let request = ObjectRequest::Commit { ticket: 2, blocks: vec![(put.number, index)] };
        match self.ask_objects(node, put.client, request) {
            Some(ObjectEvent::Committed { stored, .. }) => stored[0],
            other => panic!("{other:?}"),
        }
    }

    fn finish_put(&mut self, node: &str) {
        let Some(put) = self.take_open(node) else { return };
        if put.blocks > 1 && self.random.permille(200) {
            // The head too early: refused, and the put goes on.
            assert!(!self.commit(node, &put, 0));
            return self.objects(node).open.push(put);
        }
        for index in 1..put.blocks {
            assert!(self.commit(node, &put, index), "{put:?}");
        }
        let there = self.has_object(node, &name_key(put.name));
        let first = self.commit(node, &put, 0);
        assert_eq!(first, !there, "the first commit of a name counts");
        if first {
            self.done.add("stored", 1);
            self.objects(node).dict.insert(put.name, put);
        }
    }

    /// At any step: some of its blocks are committed.
    fn abandon_put(&mut self, node: &str) {
        let Some(put) = self.take_open(node) else { return };
        for index in 1..1 + self.random.below(put.blocks.into()) as u32 {
            assert!(self.commit(node, &put, index), "{put:?}");
        }
        self.ask_objects(node, put.client, ObjectRequest::Abandon { puts: vec![put.number] });
    }

    fn view(&mut self, node: &str, client: ClientId) {
        // Rather one that is there than not.
        let there: Vec<u8> = self.objects(node).dict.keys().copied().collect();
        let likely = !there.is_empty() && self.random.permille(700);
        let name = if likely { self.pick(&there) } else { self.random.below(NAMES) as u8 };
        let Some((pin, at)) = self.pin(node, client, name_key(name)) else { return };
        let put = self.objects(node).dict.get(&name).expect("nothing was put there").clone();
        let mut damaged = self.read_stamp(node, at, &put);
        for index in 1..put.blocks {
            let (pin, at) = self.pin(node, client, block_key(&put, index)).expect("an object is there as a whole");
            damaged |= self.read_stamp(node, at, &put);
            self.ask_objects(node, client, ObjectRequest::Release { pins: vec![pin] });
        }
        if damaged {
            self.done.add("rotten", 1);
            self.ask_objects(node, client, ObjectRequest::Damaged { blocks: vec![at] });
            self.ask_objects(node, client, ObjectRequest::Release { pins: vec![pin] });
            self.objects(node).dict.remove(&name);
            return;
        }
        self.done.add("viewed", 1);
        self.objects(node).views.push(View { client, pin, at, put: put.number, name });
    }

    fn pin(&mut self, node: &str, client: ClientId, key: BlockKey) -> Option<(u64, At)> {
        match self.ask_objects(node, client, ObjectRequest::Pin { ticket: 4, keys: vec![key], names: true }) {
            Some(ObjectEvent::Pinned { first, found, .. }) => found[0].here().map(|at| (first, *at)),
            other => panic!("{other:?}"),
        }
    }

    fn close_view(&mut self, node: &str) {
        let count = self.objects(node).views.len();
        if count > 0 {
            let at = self.random.below(count as u64) as usize;
            let view = self.objects(node).views.swap_remove(at);
            self.ask_objects(node, view.client, ObjectRequest::Release { pins: vec![view.pin] });
        }
    }

    fn remove_object(&mut self, node: &str, client: ClientId) {
        let name = self.random.below(NAMES) as u8;
        let there = self.has_object(node, &name_key(name));
        let request = ObjectRequest::Remove { ticket: 3, keys: vec![name_key(name)] };
        match self.ask_objects(node, client, request) {
            Some(ObjectEvent::Removed { removed, .. }) => assert_eq!(removed, [there]),
            other => panic!("{other:?}"),
        }
        assert!(!self.has_object(node, &name_key(name)));
        self.objects(node).dict.remove(&name);
    }

    /// And another comes.
    fn object_client_dies(&mut self, node: &str, client: ClientId) {
        let objects = self.objects(node);
        objects.readers.remove(&client);
        objects.open.retain(|put| put.client != client);
        objects.views.retain(|view| view.client != client);
        self.world.client_gone(node, client);
        let (another, catalog) = (self.client(), self.engine(node).catalog().clone());
        self.objects(node).readers.insert(another, Reader::new(catalog));
    }

    fn has_object(&self, node: &str, key: &BlockKey) -> bool {
        self.engine(node).catalog().find(key).is_some()
    }

    /// Marks a block as this put's.
    fn stamp(&self, node: &str, (region, slot): At, put: u64) {
        let arena = self.engine(node).catalog().arena(region).expect("it was named");
        let mut strip = vec![0; arena.layout().strip_bytes as usize];
        strip[..8].copy_from_slice(&put.to_le_bytes());
        arena.store(slot, 0, &strip).expect("in range");
    }

    /// Asserts that the block is this put's. True: it has rotten.
    fn read_stamp(&self, node: &str, at: At, put: &Put) -> bool {
        match self.stamped(node, at) {
            Some(stamp) => {
                assert_eq!(stamp, put.number, "another value than was put last: {put:?}");
                false
            }
            None => true,
        }
    }

    /// Whose a block is. `None`: it has rotten.
    fn stamped(&self, node: &str, (region, slot): At) -> Option<u64> {
        let arena = self.engine(node).catalog().arena(region).expect("it was named");
        let mut strip = vec![0; arena.layout().strip_bytes as usize];
        if !arena.load_held(slot, 0, &mut strip).expect("in range") {
            assert!(self.rotten.contains(&(node.to_owned(), region, slot)), "{slot:?} has rotten by itself");
            return None;
        }
        Some(u64::from_le_bytes(strip[..8].try_into().expect("8 bytes")))
    }

    /// What is there is what was put, all of it; what is viewed is as it was.
    pub fn check_objects(&mut self, node: &str) {
        let here: BTreeSet<BlockKey> = self.engine(node).catalog().keys();
        let objects = &self.objects[node];
        for View { at, put, name, .. } in &objects.views {
            assert!(
                self.stamped(node, *at).is_none_or(|stamp| stamp == *put),
                "a view of {name} at {node} has changed"
            );
        }
        let under_way =
            |key: &BlockKey| objects.open.iter().any(|put| (1..put.blocks).any(|index| block_key(put, index) == *key));
        let mut expected = BTreeSet::new();
        for put in objects.dict.values().filter(|put| here.contains(&name_key(put.name))) {
            expected.extend((0..put.blocks).map(|index| block_key(put, index)));
        }
        for key in &here {
            assert!(expected.remove(key) || under_way(key), "{key:?} at {node} is of no object");
        }
        assert!(expected.is_empty(), "objects at {node} with parts missing: {expected:?}");
        let objects = self.objects(node);
        let before = objects.dict.len();
        objects.dict.retain(|name, _| here.contains(&name_key(*name)));
        let evicted = (before - objects.dict.len()) as u64;
        self.done.add("evicted", evicted);
    }
}
