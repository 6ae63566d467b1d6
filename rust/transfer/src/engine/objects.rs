//! Objects: blocks that clients write and remove by key, whatever else the node holds (`objects/`). Reading them needs no
//! word with the engine, see `objects/catalog.rs`.
//!
//! A **put** is what a client is writing under one name: a head, and for a large value the blocks behind it. Its blocks
//! are granted one by one, under tags that only the engine knows, and held until the head is committed, which makes the
//! whole readable, or until the put is abandoned, which leaves nothing of it. From then on the blocks hang together: if
//! one goes, all go, as a value is there as a whole or not at all.
//!
//! Objects lie in DRAM only so far: the tier would have to forget them when they are removed, and a read of one that lies
//! there only would have to go by the engine.

use std::collections::{BTreeMap, HashMap};
use std::mem;
use std::sync::Arc;

use crate::messages::{GrantMode, LocalEvent, Refusal};
use crate::objects::catalog::{Catalog, Entry};
use crate::objects::classes::Class;
use crate::objects::messages::{At, BATCH_LIMIT, ObjectEvent, ObjectRequest, Reserved, Wanted};
use crate::pool::{Change, Granting, Holder, Wish};
use crate::types::{BlockKey, ClientId, Medium, Owner, Tag};

use super::Engine;

/// The namespace of all objects: no digest of anything, which would be as probable as any other number.
pub const NAMESPACE: u64 = u64::from_le_bytes(*b"objects\0");

/// A block that is being written, or waits for its head.
#[derive(Clone, Copy, Debug)]
struct Block {
    key: BlockKey,
    store: usize,
    committed: bool,
}

/// What a client writes under one name, by index of the block.
type Put = BTreeMap<u32, Block>;

/// The engine's books about objects.
#[derive(Debug)]
pub(super) struct Objects {
    pub catalog: Arc<Catalog>,
    /// Blocks reserved or pinned by puts under way, by client and the client's number.
    puts: BTreeMap<ClientId, BTreeMap<u64, Put>>,
    /// Of objects of more than one block, by the head's key: the others' keys, in their order.
    chunks: HashMap<BlockKey, Vec<BlockKey>>,
    /// And back.
    heads: HashMap<BlockKey, BlockKey>,
}

impl Objects {
    pub fn new(capacity: u64) -> Self {
        let catalog = Catalog::new(capacity);
        Self { catalog, puts: BTreeMap::new(), chunks: HashMap::new(), heads: HashMap::new() }
    }

    /// Ends a put's entry.
    fn take(&mut self, client: ClientId, put: u64) -> Option<Put> {
        let puts = self.puts.get_mut(&client)?;
        let blocks = puts.remove(&put);
        if puts.is_empty() {
            self.puts.remove(&client);
        }
        blocks
    }

    /// True if nothing is under way.
    pub fn idle(&self) -> bool {
        self.puts.is_empty()
    }

    /// What is under way, for a person.
    pub fn unfinished(&self) -> impl Iterator<Item = String> {
        self.puts.iter().map(|puts| format!("puts of {puts:?}"))
    }
}

/// Unique among all tags of a pool: workers' incarnations are times, and clients are numbered from 1.
fn holder(client: ClientId, put: u64, index: u32) -> Holder {
    Holder { client: Some(client), tag: Tag { request: put, attempt: index, worker: client } }
}

impl Engine {
    /// What clients may read, and how they pin it.
    pub fn catalog(&self) -> &Arc<Catalog> {
        &self.objects.catalog
    }

    pub(super) fn object_request(&mut self, client: ClientId, request: ObjectRequest) {
        let event = match request {
            ObjectRequest::Reserve { ticket, mut wanted } => {
                wanted.truncate(BATCH_LIMIT);
                let blocks = wanted.into_iter().map(|wanted| self.reserve(client, wanted)).collect();
                ObjectEvent::Reserved { ticket, blocks }
            }
            ObjectRequest::Commit { ticket, blocks } => {
                let stored = blocks.into_iter().map(|(put, index)| self.commit_block(client, put, index)).collect();
                ObjectEvent::Committed { ticket, stored }
            }
            ObjectRequest::Abandon { puts } => {
                return puts.into_iter().for_each(|put| self.abandon(client, put));
            }
            ObjectRequest::Remove { ticket, keys } => {
                let removed = keys.iter().map(|key| self.remove_object(key)).collect();
                ObjectEvent::Removed { ticket, removed }
            }
            ObjectRequest::Keep { ticket, keys, ttl_ms, by } => {
                ObjectEvent::Kept { ticket, outcomes: self.keep_all(&keys, ttl_ms, &by) }
            }
            ObjectRequest::Unkeep { ticket, keys, by } => {
                ObjectEvent::Kept { ticket, outcomes: self.unkeep_all(&keys, Some(&by)) }
            }
            ObjectRequest::Damaged { blocks } => {
                return blocks.into_iter().for_each(|block| self.damaged(block));
            }
            // These are answered from the catalog, by whoever has the client's connection.
            ObjectRequest::Pin { .. }
            | ObjectRequest::Release { .. }
            | ObjectRequest::Contains { .. }
            | ObjectRequest::List { .. }
            | ObjectRequest::Arena { .. }
            | ObjectRequest::Stats { .. } => return,
        };
        self.tell(client, LocalEvent::Objects(event));
    }

    /// The client's process is dead, or has let go.
    pub(super) fn object_client_gone(&mut self, client: ClientId) {
        let puts = self.objects.puts.get(&client).into_iter().flat_map(BTreeMap::keys);
        for put in puts.copied().collect::<Vec<_>>() {
            self.abandon(client, put);
        }
    }

    fn reserve(&mut self, client: ClientId, wanted: Wanted) -> Reserved {
        let Wanted { put, class, key, parent, index } = wanted;
        let Some(class) = Class::new(class) else { return Reserved::Refused(Refusal::Protocol) };
        if let Some(puts) = self.objects.puts.get(&client) {
            let known = puts.get(&put);
            if known.is_some_and(|known| known.contains_key(&index)) {
                return Reserved::Refused(Refusal::Protocol);
            }
            if known.is_none() && puts.len() >= self.settings.tags_per_client {
                return Reserved::Refused(Refusal::Full);
            }
        }
        if self.objects.catalog.find(&key).is_some() {
            return Reserved::There;
        }
        if self.is_draining() {
            return Reserved::Refused(Refusal::Full);
        }
        let store = match self.store_for(class.layout()) {
            Ok(store) => store,
            Err(_) => return Reserved::Refused(Refusal::TooLarge),
        };
        let owner = Owner { namespace: NAMESPACE, tenant: 0 };
        let wish = Wish { keys: vec![key], private: false, parent, position: index, owner };
        let slot = match self.stores.grant(store, holder(client, put, index), wish, GrantMode::Now) {
            Granting::Held(slots) => slots[0].slot,
            Granting::Refused(refusal) => return Reserved::Refused(refusal),
            // Not in this mode.
            Granting::Waiting => return Reserved::Refused(Refusal::Full),
        };
        let puts = self.objects.puts.entry(client).or_default();
        puts.entry(put).or_default().insert(index, Block { key, store, committed: false });
        let Some(region) = self.stores.get(store).map(|store| store.region) else {
            return Reserved::Refused(Refusal::Protocol);
        };
        Reserved::Slot { region, slot }
    }

    /// True if the block is readable now, and by this put.
    fn commit_block(&mut self, client: ClientId, put: u64, index: u32) -> bool {
        let Some(blocks) = self.objects.puts.get(&client).and_then(|puts| puts.get(&put)) else { return false };
        let Some(&Block { key, store, committed: false }) = blocks.get(&index) else { return false };
        // A head that comes before its rest would make a value readable that is not whole.
        if index == 0 && !blocks.iter().all(|(index, block)| *index == 0 || block.committed) {
            return false;
        }
        let holder = holder(client, put, index);
        let done = self.stores.commit(store, holder, 0, None).is_ok();
        let first = self.stores.get(store).is_some_and(|store| {
            let mine = store.pool.granted_at(holder, 0).map(|slot| slot.slot);
            store.pool.find(&key) == mine
        });
        if !(done && first) {
            if index == 0 {
                self.abandon(client, put);
            }
            return false;
        }
        if index > 0 {
            let puts = self.objects.puts.get_mut(&client);
            if let Some(block) = puts.and_then(|puts| puts.get_mut(&put)?.get_mut(&index)) {
                block.committed = true;
            }
            return true;
        }
        let blocks = self.objects.take(client, put).unwrap_or_default();
        let chunks: Vec<BlockKey> = blocks.values().skip(1).map(|block| block.key).collect();
        if !chunks.is_empty() {
            self.objects.heads.extend(chunks.iter().map(|chunk| (*chunk, key)));
            self.objects.chunks.insert(key, chunks);
        }
        self.end_put(client, put, &blocks);
        true
    }

    /// Ends a put whose head was not committed.
    fn abandon(&mut self, client: ClientId, put: u64) {
        let Some(blocks) = self.objects.take(client, put) else { return };
        for (&index, block) in blocks.iter().filter(|(_, block)| block.committed) {
            if let Some(store) = self.stores.get_mut(block.store)
                && let Some(slot) = store.pool.granted_at(holder(client, put, index), 0)
            {
                store.pool.unpublish(slot.slot);
            }
        }
        self.end_put(client, put, &blocks);
    }

    /// From tail to head, so that the head counts as used last.
    fn end_put(&mut self, client: ClientId, put: u64, blocks: &Put) {
        for (&index, block) in blocks.iter().rev() {
            if let Some(store) = self.stores.get_mut(block.store) {
                store.pool.release(holder(client, put, index));
            }
        }
    }

    fn remove_object(&mut self, key: &BlockKey) -> bool {
        let Some(Entry { region, slot, head: true }) = self.objects.catalog.find(key) else { return false };
        let removed = self.unpublish((region, slot));
        // Twice in one message: the second time it is gone.
        self.note_objects();
        removed
    }

    fn damaged(&mut self, (region, slot): At) {
        let is_objects = self.objects.catalog.arena(region).is_some();
        if is_objects && self.unpublish((region, slot)) {
            self.stats.corrupt_arena += 1;
        }
    }

    fn unpublish(&mut self, (region, slot): At) -> bool {
        let mut stores = self.stores.iter_mut();
        stores.find(|store| store.region == region).is_some_and(|store| store.pool.unpublish(slot))
    }

    /// Before each input: what has been read since the last one.
    pub(super) fn notice_reads(&mut self) {
        let (notices, overflowed) = self.objects.catalog.take_notices();
        for notice in notices {
            let (region, slot) = notice.at;
            if let Some(store) = self.stores.iter_mut().find(|store| store.region == region) {
                store.pool.noticed(slot, notice.taken);
            }
        }
        if overflowed {
            self.stores.iter_mut().for_each(|store| store.pool.look_at_views());
        }
    }

    /// Takes what has changed among objects into the catalog. What lost a part loses the rest.
    pub(super) fn note_objects(&mut self) {
        loop {
            let mut gone = Vec::new();
            for store in self.stores.iter_mut().filter(|store| store.objects) {
                for change in store.pool.take_changes() {
                    match change {
                        Change::Stored(place) => {
                            // One that was removed again within the same input has no slot; its removal follows.
                            if let Some(slot) = store.pool.find(&place.key) {
                                let entry = Entry { region: store.region, slot, head: place.position == 0 };
                                self.objects.catalog.insert(place.key, entry);
                            }
                        }
                        Change::Removed(key) => {
                            self.objects.catalog.remove(&key);
                            gone.push(key);
                        }
                    }
                }
            }
            if gone.is_empty() {
                return;
            }
            for key in gone {
                self.kept_is_gone(&key);
                let head = self.objects.heads.remove(&key).unwrap_or(key);
                // The head's key may have been put anew meanwhile; a chunk's never is.
                if head != key {
                    self.forget_block(&head);
                }
                for chunk in self.objects.chunks.remove(&head).unwrap_or_default() {
                    self.objects.heads.remove(&chunk);
                    self.forget_block(&chunk);
                }
            }
        }
    }

    fn forget_block(&mut self, key: &BlockKey) {
        if let Some(Entry { region, slot, .. }) = self.objects.catalog.find(key) {
            self.unpublish((region, slot));
        }
    }

    /// The blocks of an object behind its head.
    pub(super) fn object_chunks(&self, head: &BlockKey) -> &[BlockKey] {
        self.objects.chunks.get(head).map_or(&[], Vec::as_slice)
    }

    /// Where the blocks of an object lie. For tests.
    pub fn find_object(&self, key: &BlockKey) -> Option<Medium> {
        self.objects.catalog.find(key).map(|_| Medium::Dram)
    }

    pub(super) fn check_objects(&self) {
        let catalog = &self.objects.catalog;
        let mut keys = std::collections::BTreeSet::new();
        for store in self.stores.iter().filter(|store| store.objects) {
            for place in store.pool.published() {
                let slot = store.pool.find(&place.key).expect("a published block is found");
                let entry = Entry { region: store.region, slot, head: place.position == 0 };
                assert_eq!(catalog.find(&place.key), Some(entry), "the catalog and {place:?}");
                assert!(keys.insert(place.key));
            }
        }
        assert_eq!(catalog.keys(), keys, "the catalog has what is not there");
        let mut heads: HashMap<BlockKey, BlockKey> = HashMap::new();
        for (head, chunks) in &self.objects.chunks {
            for key in chunks.iter().chain([head]) {
                assert!(keys.contains(key), "an object with a part missing");
            }
            heads.extend(chunks.iter().map(|chunk| (*chunk, *head)));
        }
        assert_eq!(self.objects.heads, heads, "chunks and heads");
        let mut loose: std::collections::BTreeSet<BlockKey> = mem::take(&mut keys);
        for store in self.stores.iter().filter(|store| store.objects) {
            for place in store.pool.published().filter(|place| place.position == 0) {
                loose.remove(&place.key);
            }
        }
        let under_way =
            self.objects.puts.values().flat_map(|puts| puts.values().flat_map(BTreeMap::values)).map(|block| block.key);
        for key in heads.keys().copied().chain(under_way) {
            loose.remove(&key);
        }
        assert!(loose.is_empty(), "parts of no object: {loose:?}");
    }
}
