//! Nodes that share objects, over the simulated network, and clients of theirs.
#![allow(dead_code)] // Each test takes what it needs.

use std::collections::BTreeMap;
use std::sync::Arc;

use pyengine_transfer::engine::{Input, Settings};
use pyengine_transfer::memory::Arena;
use pyengine_transfer::messages::{DaemonOrder, LocalEvent, LocalRequest, PeerMessage, Refusal};
use pyengine_transfer::objects::classes::{self, CHUNK, Class, Trailer, tail};
use pyengine_transfer::objects::hints::Head;
use pyengine_transfer::objects::homes::Homes;
use pyengine_transfer::objects::messages::{
    At, ObjectEvent, ObjectRequest, Reserved, Sighting, UNKNOWN, Wanted, chain, lone,
};
use pyengine_transfer::objects::reader::{Answer, Reader};
use pyengine_transfer::objects::talk::Talk;
use pyengine_transfer::transport::sim::{Faults, World};
use pyengine_transfer::types::{BlockKey, NodeAddress};

pub const SECOND: u64 = 1_000_000_000;
/// Virtual time that any answer may take.
const PATIENCE: u64 = 60 * SECOND;
const DRAM: u64 = 24 << 20;
/// Every node has one client.
const CLIENT: u64 = 1;

pub fn name_key(name: u64) -> BlockKey {
    let mut key = *pyengine_transfer::keys::object_key(&name.to_le_bytes(), &[1; 32]).0.first_chunk().expect("16");
    key[15] = name as u8;
    BlockKey(key)
}

fn nonce(name: u8, value: u64, put: u64) -> [u8; 16] {
    let mut nonce = [name; 16];
    nonce[..8].copy_from_slice(&value.to_be_bytes());
    nonce[8..15].copy_from_slice(&put.to_be_bytes()[1..]);
    nonce
}

/// Key of a block of this value.
fn block_key(name: u8, nonce: [u8; 16], index: u32) -> BlockKey {
    match index {
        0 => name_key(name.into()),
        _ => pyengine_transfer::keys::chunk_keys(name_key(name.into()), &nonce, index, &[1; 32])[index as usize - 1],
    }
}

/// All bytes of a value's block.
fn content(value: u64, index: u32, blocks: u32) -> Vec<u8> {
    let bytes = if index + 1 < blocks { CHUNK as usize } else { 100 };
    let first = value.wrapping_mul(31).wrapping_add(u64::from(index));
    (0..bytes as u64).map(|at| (first + at / 7) as u8).collect()
}

pub struct Cluster {
    pub world: World,
    pub addresses: BTreeMap<String, NodeAddress>,
    readers: BTreeMap<String, Reader>,
    tickets: u64,
    puts: u64,
    told: Vec<(String, ObjectEvent)>,
    settings: Settings,
}

impl Cluster {
    pub fn new(seed: u64, nodes: &[&str]) -> Self {
        Self::with(seed, nodes, Faults::default())
    }

    pub fn with(seed: u64, nodes: &[&str], faults: Faults) -> Self {
        Self::like(seed, nodes, faults, Settings::new(DRAM))
    }

    /// Of nodes that have so few questions under way at once.
    pub fn narrow(seed: u64, nodes: &[&str], fetches: usize) -> Self {
        Self::like(seed, nodes, Faults::default(), Settings { fetches, ..Settings::new(DRAM) })
    }

    fn like(seed: u64, nodes: &[&str], faults: Faults, settings: Settings) -> Self {
        let (addresses, readers, told) = Default::default();
        let world = World::new(seed, faults);
        let mut cluster = Self { world, addresses, readers, tickets: 0, puts: 0, told, settings };
        nodes.iter().for_each(|node| cluster.start(node));
        cluster.world.run(3 * SECOND);
        cluster
    }

    /// Starts a node, or starts it again with nothing in it; all are told.
    pub fn start(&mut self, node: &str) {
        let address = self.world.start(node, self.settings.clone());
        self.addresses.insert(node.into(), address);
        self.readers.remove(node);
        self.name_members();
    }

    fn name_members(&mut self) {
        let members: Vec<NodeAddress> = self.addresses.values().cloned().collect();
        for node in self.addresses.keys() {
            self.world.order(node, DaemonOrder::Members { members: members.clone() });
        }
    }

    pub fn kill(&mut self, node: &str) {
        self.world.kill(node);
        self.readers.remove(node);
    }

    pub fn alive(&self) -> Vec<String> {
        self.addresses.keys().filter(|node| self.world.engine(node).is_some()).cloned().collect()
    }

    pub fn cut_off(&mut self, node: &str) {
        let others: Vec<String> = self.addresses.keys().filter(|other| *other != node).cloned().collect();
        others.iter().for_each(|other| self.world.cut(node, other));
    }

    pub fn bring_back(&mut self, node: &str) {
        let others: Vec<String> = self.addresses.keys().filter(|other| *other != node).cloned().collect();
        others.iter().for_each(|other| self.world.heal(node, other));
    }

    pub fn home(&self, name: u8) -> String {
        let homes = Homes::new(self.addresses.keys().cloned());
        homes.home(&name_key(name.into())).expect("there are members").clone()
    }

    // -- asking ------------------------------------------------------------------------------------------------------

    /// Asks; the answer is taken by `answer`.
    pub fn begin(&mut self, node: &str, make: impl FnOnce(u64) -> ObjectRequest) -> u64 {
        self.tickets += 1;
        let ticket = self.tickets;
        let Some(engine) = self.world.engine(node) else { return ticket };
        let catalog = engine.catalog().clone();
        let reader = self.readers.entry(node.into()).or_insert_with(|| Reader::new(catalog));
        match reader.answer(make(ticket)) {
            Answer::Pass(request) => self.world.request(node, CLIENT, LocalRequest::Objects(request)),
            Answer::Tell(event, _) => self.told.push((node.into(), event)),
            Answer::Done => {}
        }
        ticket
    }

    /// Waits for an answer. `None`: its node has died.
    pub fn answer(&mut self, node: &str, ticket: u64) -> Option<ObjectEvent> {
        let until = self.world.now() + PATIENCE;
        loop {
            for (at, client, event) in self.world.take_events() {
                if let LocalEvent::Objects(event) = event {
                    assert_eq!(client, CLIENT);
                    self.told.push((at, event));
                }
            }
            if let Some(at) = self.told.iter().position(|(at, event)| at == node && event.ticket() == ticket) {
                return Some(self.told.swap_remove(at).1);
            }
            let engine = self.world.engine(node)?;
            assert!(self.world.now() < until, "no answer at {node}: {:?}", engine.unfinished());
            self.world.step();
        }
    }

    pub fn ask(&mut self, node: &str, make: impl FnOnce(u64) -> ObjectRequest) -> Option<ObjectEvent> {
        let ticket = self.begin(node, make);
        self.answer(node, ticket)
    }

    pub fn begin_reserve(&mut self, node: &str, name: u8, put: u64) -> u64 {
        let (key, parent) = (name_key(name.into()), lone([put as u8; 12]));
        let wanted = Wanted { put: 1 << 40 | put, class: 0, key, parent, index: 0 };
        self.begin(node, |ticket| ObjectRequest::Reserve { ticket, wanted: vec![wanted] })
    }

    pub fn reserved(&mut self, node: &str, ticket: u64) -> Vec<Reserved> {
        match self.answer(node, ticket) {
            Some(ObjectEvent::Reserved { blocks, .. }) => blocks,
            None => Vec::new(),
            other => panic!("{other:?}"),
        }
    }

    pub fn abandon_all(&mut self, node: &str) {
        self.begin(node, |_| ObjectRequest::Abandon { puts: (0..10).map(|put| 1 << 40 | put).collect() });
    }

    pub fn client_dies(&mut self, node: &str) {
        self.readers.remove(node);
        self.world.client_gone(node, CLIENT);
    }

    /// Puts a value of so many blocks. `None`: there is no room, or the node is dead.
    pub fn put(&mut self, node: &str, name: u8, value: u64, blocks: u32) -> Option<bool> {
        self.try_put(node, name, value, blocks).ok().flatten()
    }

    pub fn put_refused(&mut self, node: &str, name: u8) -> Refusal {
        self.try_put(node, name, 1, 1).expect_err("it is refused")
    }

    fn try_put(&mut self, node: &str, name: u8, value: u64, blocks: u32) -> Result<Option<bool>, Refusal> {
        self.puts += 1;
        let (put, nonce) = (self.puts, nonce(name, value, self.puts));
        let class = if blocks > 1 { Class::LARGEST.number() } else { 0 };
        let second = block_key(name, nonce, 1);
        let head = if blocks == 1 { lone(nonce[4..].try_into().expect("12")) } else { chain(blocks, Some(&second)) };
        let parent = |index| if index == 0 { head } else { block_key(name, nonce, index - 1) };
        let wanted = (0..blocks).map(|index| Wanted {
            put,
            class,
            key: block_key(name, nonce, index),
            parent: parent(index),
            index,
        });
        let wanted: Vec<Wanted> = wanted.collect();
        let ticket = self.begin(node, |ticket| ObjectRequest::Reserve { ticket, wanted });
        let reserved = self.reserved(node, ticket);
        if reserved.is_empty() {
            return Ok(None);
        }
        let bytes = u64::from(blocks - 1) * CHUNK + 100;
        for (index, reserved) in (0..).zip(reserved) {
            match reserved {
                Reserved::Slot { region, slot } => {
                    let Some(arena) = self.arena(node, region) else { return Ok(None) };
                    let name = [name];
                    let name = if index == 0 { &name[..] } else { &[] };
                    let trailer = Trailer { value: bytes, nonce, index, name };
                    classes::write(&arena, slot, &content(value, index, blocks), &trailer).expect("it fits");
                }
                Reserved::There => {
                    self.begin(node, |_| ObjectRequest::Abandon { puts: vec![put] });
                    return Ok(Some(false));
                }
                Reserved::Refused(refusal) => {
                    self.begin(node, |_| ObjectRequest::Abandon { puts: vec![put] });
                    return Err(refusal);
                }
            }
        }
        let order = (1..blocks).chain([0]).map(|index| (put, index)).collect();
        match self.ask(node, |ticket| ObjectRequest::Commit { ticket, blocks: order }) {
            Some(ObjectEvent::Committed { stored, .. }) => Ok(Some(stored.ends_with(&[true]))),
            None => Ok(None),
            other => panic!("{other:?}"),
        }
    }

    /// The value's nonce, all of it verified; `None`: a miss.
    pub fn get(&mut self, node: &str, name: u8) -> Option<[u8; 16]> {
        let ticket = self.begin_get(node, name);
        self.got(node, name, ticket)
    }

    /// The first half: it is brought, if it is not here.
    pub fn begin_get(&mut self, node: &str, name: u8) -> Option<u64> {
        let key = name_key(name.into());
        match self.pin(node, key)? {
            Sighting::Behind { .. } => Some(self.begin_bring(node, name)),
            Sighting::Here(_) | Sighting::Missing => None,
        }
    }

    pub fn begin_bring(&mut self, node: &str, name: u8) -> u64 {
        let wanted = Wanted { put: 0, class: UNKNOWN, key: name_key(name.into()), parent: BlockKey([0; 16]), index: 0 };
        self.begin(node, |ticket| ObjectRequest::Bring { ticket, wanted: vec![wanted] })
    }

    pub fn brought(&mut self, node: &str, ticket: u64) -> Result<(), Refusal> {
        match self.answer(node, ticket) {
            Some(ObjectEvent::Brought { blocks, .. }) => blocks[0],
            other => panic!("{other:?}"),
        }
    }

    pub fn got(&mut self, node: &str, name: u8, ticket: Option<u64>) -> Option<[u8; 16]> {
        if let Some(ticket) = ticket {
            match self.answer(node, ticket) {
                Some(ObjectEvent::Brought { .. }) | None => {}
                other => panic!("{other:?}"),
            }
        }
        match self.pin(node, name_key(name.into()))? {
            // Pinned only to be looked at: what is verified is held as long.
            Sighting::Here(_) => self.verify(node, name),
            Sighting::Behind { .. } | Sighting::Missing => None,
        }
    }

    /// Pins, and lets go again.
    fn pin(&mut self, node: &str, key: BlockKey) -> Option<Sighting<At>> {
        match self.ask(node, |ticket| ObjectRequest::Pin { ticket, keys: vec![key], names: true }) {
            Some(ObjectEvent::Pinned { first, found, .. }) => {
                self.begin(node, |_| ObjectRequest::Release { pins: vec![first] });
                Some(found[0])
            }
            None => None,
            other => panic!("{other:?}"),
        }
    }

    pub fn exists(&mut self, node: &str, name: u8) -> bool {
        let keys = vec![name_key(name.into())];
        match self.ask(node, |ticket| ObjectRequest::Contains { ticket, keys }) {
            Some(ObjectEvent::Contained { found, .. }) => found[0].is_some(),
            None => false,
            other => panic!("{other:?}"),
        }
    }

    /// Whether there was one, and who could not be told.
    pub fn remove(&mut self, node: &str, name: u8) -> (bool, Vec<String>) {
        let keys = vec![name_key(name.into())];
        match self.ask(node, |ticket| ObjectRequest::Remove { ticket, keys }) {
            Some(ObjectEvent::Removed { removed, missing, .. }) => (removed[0], missing),
            None => (false, vec![node.into()]),
            other => panic!("{other:?}"),
        }
    }

    pub fn begin_copies(&mut self, node: &str, name: u8, wanted: u32) -> u64 {
        let keys = vec![name_key(name.into())];
        self.begin(node, |ticket| ObjectRequest::Copies { ticket, keys, wanted })
    }

    pub fn copied(&mut self, node: &str, ticket: u64) -> u32 {
        match self.answer(node, ticket) {
            Some(ObjectEvent::Copies { copies, .. }) => copies[0],
            None => 0,
            other => panic!("{other:?}"),
        }
    }

    pub fn copies(&mut self, node: &str, name: u8, wanted: u32) -> u32 {
        let ticket = self.begin_copies(node, name, wanted);
        self.copied(node, ticket)
    }

    /// Has a home believe that a member holds a value of so many blocks under this name.
    pub fn mislead(&mut self, home: &str, member: &str, name: u8, blocks: u32) {
        let nonce = nonce(name, 77, 0);
        let value = match blocks {
            1 => lone(nonce[4..].try_into().expect("12")),
            _ => chain(blocks, Some(&block_key(name, nonce, 1))),
        };
        let class = if blocks > 1 { Class::LARGEST.number() } else { 0 };
        let head = Head { key: name_key(name.into()), value, class };
        self.tell(home, member, vec![(head, true)]);
    }

    /// The home is told this in a member's name.
    pub fn tell(&mut self, home: &str, member: &str, news: Vec<(Head, bool)>) {
        let told = PeerMessage::Objects(Talk::Told { news, all: None, heard: false });
        let input = Input::Peer { peer: member.into(), message: told };
        self.world.act(home, |engine, now, out| engine.handle(input, now, out)).expect("it lives");
    }

    pub fn drain(&mut self, node: &str) {
        self.world.act(node, |engine, _, _| engine.drain(true));
    }

    // -- looking -----------------------------------------------------------------------------------------------------

    fn arena(&self, node: &str, region: pyengine_transfer::types::RegionId) -> Option<Arc<Arena>> {
        self.world.engine(node)?.catalog().arena(region)
    }

    /// Where a block lies.
    fn at(&self, node: &str, key: &BlockKey) -> Option<(Arc<Arena>, At)> {
        let entry = self.world.engine(node)?.catalog().find(key)?;
        let (region, slot) = entry.dram?;
        Some((self.arena(node, region)?, (region, slot)))
    }

    /// Who has it.
    pub fn have(&self, name: u8) -> Vec<String> {
        let has = |node: &&String| self.at(node, &name_key(name.into())).is_some();
        self.addresses.keys().filter(has).cloned().collect()
    }

    /// The value that a node has under this name, all of it.
    pub fn verify(&self, node: &str, name: u8) -> Option<[u8; 16]> {
        let (arena, (_, slot)) = self.at(node, &name_key(name.into()))?;
        let mut space = tail();
        let head = Trailer::read(&arena, slot, &mut space).expect("a head");
        assert_eq!(head.name, [name]);
        let value = u64::from_be_bytes(*head.nonce.first_chunk().expect("8"));
        for index in 0..head.blocks() {
            let key = block_key(name, head.nonce, index);
            let (arena, (_, slot)) = self.at(node, &key).expect("an object is there as a whole");
            let expected = content(value, index, head.blocks());
            let mut bytes = vec![0; expected.len()];
            assert!(classes::read(&arena, slot, &mut bytes).expect("in range"), "{node} has a damaged {name}");
            assert_eq!(bytes, expected, "{node} has another {name} than was put");
        }
        Some(head.nonce)
    }

    /// Looks at all copies: the values there are.
    pub fn verify_all(&self, name: u8) -> std::collections::BTreeSet<[u8; 16]> {
        self.have(name).iter().filter_map(|node| self.verify(node, name)).collect()
    }

    /// Damages one block of what a node has.
    pub fn damage(&self, node: &str, name: u8, index: u32) {
        let (arena, (_, slot)) = self.at(node, &name_key(name.into())).expect("it is there");
        let mut space = tail();
        let head = Trailer::read(&arena, slot, &mut space).expect("a head");
        let (arena, (_, slot)) = self.at(node, &block_key(name, head.nonce, index)).expect("it is there");
        arena.corrupt_for_test(slot.slot, 0);
    }

    /// Objects that have left a node that drains.
    pub fn moved(&self, node: &str) -> u64 {
        self.world.engine(node).map_or(0, |engine| engine.moved())
    }

    pub fn all_idle(&self) {
        for node in self.alive() {
            let engine = self.world.engine(&node).expect("it lives");
            assert_eq!(engine.unfinished(), Vec::<String>::new(), "{node}");
        }
    }
}
