//! Objects: blocks that clients write and remove by key, whatever else the node holds (`objects/`). Reading them needs no
//! word with the engine, see `objects/catalog.rs`.
//!
//! A **put** is what a client is writing under one name: a head, and for a large value the blocks behind it. Its blocks
//! are granted one by one, under tags that only the engine knows, and held until the head is committed, which makes the
//! whole readable, or until the put is abandoned, which leaves nothing of it. (With an SSD, until they are on that:
//! `objects/ssd.rs`.) From then on the blocks hang together: if one goes, all go, as a value is there as a whole or not at all.

mod bring;
mod ssd;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::mem;
use std::sync::Arc;

use crate::messages::{GrantMode, LocalEvent, Refusal};
use crate::objects::catalog::Catalog;
use crate::objects::classes::Class;
use crate::objects::hints::Head;
use crate::objects::messages::{At, BATCH_LIMIT, ObjectEvent, ObjectRequest, Reserved, Wanted, chained};
use crate::pool::tier::Health;
use crate::pool::{Change, Granting, Holder, Wish};
use crate::types::{BlockKey, ClientId, Medium, Owner, Tag};

use super::Engine;
use super::copying::ENGINE;
use bring::Brings;
use ssd::Held;

pub(super) use ssd::is_object;

/// The namespace of all objects: no digest of anything, which would be as probable as any other number.
pub const NAMESPACE: u64 = u64::from_le_bytes(*b"objects\0");

/// A block that is being written, or waits for its head.
#[derive(Clone, Copy, Debug)]
pub(super) struct Block {
    pub key: BlockKey,
    pub store: usize,
    pub committed: bool,
}

/// What a client writes under one name.
#[derive(Clone, Debug, Default)]
struct Put {
    /// By index.
    blocks: BTreeMap<u32, Block>,
    /// Of its head, see `chain`.
    chain: BlockKey,
    /// One of its blocks has been lost: it can only be abandoned.
    broken: bool,
}

impl Put {
    /// True if all blocks behind the head are committed, and are those that the head announces.
    fn is_whole(&self) -> bool {
        let mut blocks = self.blocks.iter();
        let head = blocks.next().is_some_and(|(index, _)| *index == 0);
        let rest = (1..).zip(blocks).all(|(index, (at, block))| index == *at && block.committed);
        let second = self.blocks.get(&1).map_or(self.chain, |second| second.key);
        head && rest && !self.broken && chained(&self.chain, &second) == (self.blocks.len() as u32, true)
    }
}

/// The engine's books about objects.
#[derive(Debug)]
pub(super) struct Objects {
    pub catalog: Arc<Catalog>,
    /// Blocks reserved or pinned by puts under way, by client and the client's number.
    puts: BTreeMap<ClientId, BTreeMap<u64, Put>>,
    /// Of objects of more than one block, by the head's key: the others' keys, in their order.
    pub chunks: HashMap<BlockKey, Vec<BlockKey>>,
    /// And back.
    heads: HashMap<BlockKey, BlockKey>,
    /// Committed blocks whose heads are not: which client's put they are of.
    parts: HashMap<BlockKey, (ClientId, u64)>,
    /// Blocks that are on no medium any more: what hangs together with them is to go.
    gone: Vec<BlockKey>,
    /// Blocks that were removed since the last look at the tier, and since the one before: it may still tell that it has let
    /// go of them.
    removed: [BTreeSet<BlockKey>; 2],
    brings: Brings,
    held: Held,
}

impl Objects {
    pub fn new(capacity: u64) -> Self {
        Self {
            catalog: Catalog::new(capacity),
            puts: BTreeMap::new(),
            chunks: HashMap::new(),
            heads: HashMap::new(),
            parts: HashMap::new(),
            gone: Vec::new(),
            removed: Default::default(),
            brings: Brings::default(),
            held: Held::default(),
        }
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

    /// A block that is fetched for a copy.
    pub fn begin_copied(&mut self, put: u64, index: u32, block: Block) {
        self.puts.entry(ENGINE).or_default().entry(put).or_default().blocks.insert(index, block);
    }

    /// A block of a copy, or why there is none: one that was here has been lost.
    pub fn is_broken(&self, put: u64) -> bool {
        self.puts.get(&ENGINE).and_then(|puts| puts.get(&put)).is_some_and(|put| put.broken)
    }

    /// True if nothing is under way.
    pub fn idle(&self) -> bool {
        self.puts.is_empty() && self.brings.idle()
    }

    /// What is under way, for a person.
    pub fn unfinished(&self) -> impl Iterator<Item = String> {
        let puts = self.puts.iter().map(|puts| format!("puts of {puts:?}"));
        puts.chain(self.brings.unfinished())
    }
}

/// Unique among all tags of a pool: workers' incarnations are times, and clients are numbered from 1.
pub(super) fn holder(client: ClientId, put: u64, index: u32) -> Holder {
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
                return self.object_reserve(client, ticket, wanted);
            }
            ObjectRequest::Commit { ticket, blocks } => {
                let stored = blocks.into_iter().map(|(put, index)| self.commit_block(client, put, index)).collect();
                self.write_held();
                ObjectEvent::Committed { ticket, stored }
            }
            ObjectRequest::Abandon { puts } => {
                return puts.into_iter().for_each(|put| self.abandon(client, put));
            }
            ObjectRequest::Remove { ticket, mut keys } => {
                keys.truncate(BATCH_LIMIT);
                return self.object_remove(client, ticket, keys);
            }
            ObjectRequest::Copies { ticket, mut keys, wanted } => {
                keys.truncate(BATCH_LIMIT);
                return self.object_copies(client, ticket, keys, wanted);
            }
            ObjectRequest::Spread { mut keys, wanted } => {
                keys.truncate(BATCH_LIMIT);
                return self.objects_spread(keys, wanted);
            }
            ObjectRequest::Come { mut keys } => {
                keys.truncate(BATCH_LIMIT);
                return self.objects_expected(keys);
            }
            ObjectRequest::Contains { ticket, mut keys } => {
                keys.truncate(BATCH_LIMIT);
                return self.object_exists(client, ticket, &keys);
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
            // These are answered later.
            ObjectRequest::Bring { ticket, wanted } => return self.bring(client, ticket, wanted),
            ObjectRequest::AwaitRoom { ticket } => return self.await_room(client, ticket),
            ObjectRequest::Flush { ticket } => return self.flush(client, ticket),
            // These are answered from the catalog, by whoever has the client's connection.
            ObjectRequest::Pin { .. }
            | ObjectRequest::Release { .. }
            | ObjectRequest::List { .. }
            | ObjectRequest::Arena { .. }
            | ObjectRequest::Stats { .. } => return,
        };
        self.tell(client, LocalEvent::Objects(event));
    }

    /// The client's process is dead, or has let go.
    pub(super) fn object_client_gone(&mut self, client: ClientId) {
        self.client_quests_gone(client);
        let puts = self.objects.puts.get(&client).into_iter().flat_map(BTreeMap::keys);
        for put in puts.copied().collect::<Vec<_>>() {
            self.abandon(client, put);
        }
        self.forget_brings(client);
        self.forget_room(client);
    }

    /// Time has passed.
    pub(super) fn objects_tick(&mut self) {
        // Copies to peers read, too: who lets go of a block meanwhile is not the last.
        self.stores.iter_mut().for_each(|store| store.pool.look_at_views());
        self.keep_no_longer();
        self.give_up_room();
    }

    pub(super) fn reserve(&mut self, client: ClientId, wanted: Wanted) -> Reserved {
        let Wanted { put, class, key, parent, index } = wanted;
        let Some(class) = Class::new(class) else { return Reserved::Refused(Refusal::Protocol) };
        if let Some(puts) = self.objects.puts.get(&client) {
            let known = puts.get(&put);
            if known.is_some_and(|known| known.blocks.contains_key(&index)) {
                return Reserved::Refused(Refusal::Protocol);
            }
            if known.is_some_and(|known| known.broken) {
                return Reserved::Refused(Refusal::Missing);
            }
            if known.is_none() && puts.len() >= self.settings.tags_per_client {
                return Reserved::Refused(Refusal::Full);
            }
        }
        if let Some(entry) = self.objects.catalog.find(&key) {
            if entry.dram.is_some() || self.tier_health_of(&key) != Some(Health::Failed) {
                return Reserved::There;
            }
            // Nobody can get it, and nobody knows whether anybody ever will.
            self.forget_block(&key);
            self.note_objects();
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
            Granting::Refused(refusal) => {
                self.was_refused(client);
                return Reserved::Refused(refusal);
            }
            // Not in this mode.
            Granting::Waiting => return Reserved::Refused(Refusal::Full),
        };
        let puts = self.objects.puts.entry(client).or_default();
        let known = puts.entry(put).or_default();
        known.blocks.insert(index, Block { key, store, committed: false });
        if index == 0 {
            known.chain = parent;
        }
        let Some(region) = self.stores.get(store).map(|store| store.region) else {
            return Reserved::Refused(Refusal::Protocol);
        };
        Reserved::Slot { region, slot }
    }

    /// True if the block is readable now, and by this put.
    fn commit_block(&mut self, client: ClientId, put: u64, index: u32) -> bool {
        let Some(known) = self.objects.puts.get(&client).and_then(|puts| puts.get(&put)) else { return false };
        let Some(&Block { key, store, committed: false }) = known.blocks.get(&index) else { return false };
        // A head that comes before its rest would make a value readable that is not whole.
        if index == 0 && !known.is_whole() {
            return false;
        }
        let holder = holder(client, put, index);
        // Another one's may lie on the SSD only.
        let new = self.objects.catalog.find(&key).is_none();
        let done = new && self.stores.commit(store, holder, 0, None).is_ok();
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
            self.part_committed(client, put, index);
            return true;
        }
        self.claim_over(client, put, true);
        self.keep_put(client, put, key);
        true
    }

    /// A block behind the head of a put is here.
    pub(super) fn part_committed(&mut self, client: ClientId, put: u64, index: u32) {
        let puts = self.objects.puts.get_mut(&client);
        let Some(block) = puts.and_then(|puts| puts.get_mut(&put)?.blocks.get_mut(&index)) else { return };
        block.committed = true;
        let Block { key, store, .. } = *block;
        self.objects.parts.insert(key, (client, put));
        if self.holds_back() {
            self.hold_back(key, store, holder(client, put, index));
        }
    }

    /// Ends a put whose head is readable: from now on its blocks hang together.
    pub(super) fn keep_put(&mut self, client: ClientId, put: u64, key: BlockKey) {
        let Put { blocks, .. } = self.objects.take(client, put).unwrap_or_default();
        let chunks: Vec<BlockKey> = blocks.values().skip(1).map(|block| block.key).collect();
        if !chunks.is_empty() {
            for chunk in &chunks {
                self.objects.parts.remove(chunk);
            }
            self.objects.heads.extend(chunks.iter().map(|chunk| (*chunk, key)));
            self.objects.chunks.insert(key, chunks);
            if let Some(head) = blocks.get(&0).filter(|_| self.holds_back()) {
                self.hold_back(key, head.store, holder(client, put, 0));
            }
        }
        self.end_put(client, put, &blocks);
    }

    /// Ends a put whose head was not committed.
    pub(super) fn abandon(&mut self, client: ClientId, put: u64) {
        self.claim_over(client, put, false);
        let Some(Put { blocks, .. }) = self.objects.take(client, put) else { return };
        self.note_objects();
        for block in blocks.values().filter(|block| block.committed) {
            if self.objects.parts.remove(&block.key).is_some() {
                self.forget_block(&block.key);
            }
        }
        self.end_put(client, put, &blocks);
        self.note_objects();
    }

    /// From tail to head, so that the head counts as used last.
    fn end_put(&mut self, client: ClientId, put: u64, blocks: &BTreeMap<u32, Block>) {
        for (&index, block) in blocks.iter().rev() {
            if let Some(store) = self.stores.get_mut(block.store)
                && !self.objects.held.is_by(&block.key, holder(client, put, index))
            {
                store.pool.release(holder(client, put, index));
            }
        }
    }

    pub(super) fn remove_object(&mut self, key: &BlockKey) -> bool {
        let is_head = self.objects.catalog.find(key).is_some_and(|entry| entry.head);
        let removed = is_head && self.forget_block(key);
        // Twice in one message: the second time it is gone.
        self.note_objects();
        removed
    }

    fn damaged(&mut self, (region, slot): At) {
        let store = self.stores.iter().find(|store| store.objects && store.region == region);
        let place = store.and_then(|store| store.pool.describe(slot)).map(|(place, _)| place);
        if place.is_some_and(|place| self.forget_block(&place.key)) {
            self.stats.corrupt_arena += 1;
        }
    }

    /// Before each input: what has been read since the last one.
    pub(super) fn notice_reads(&mut self) {
        let (notices, overflowed) = self.objects.catalog.take_notices();
        for notice in notices {
            let (region, slot) = notice.at;
            if let Some(store) = self.stores.iter_mut().find(|store| store.region == region) {
                store.pool.noticed(slot, notice.taken);
            }
            if notice.taken {
                self.end_keeping(notice.at);
            }
        }
        if overflowed {
            self.stores.iter_mut().for_each(|store| store.pool.look_at_views());
        }
    }

    /// Takes what has changed among objects into the catalog. What lost a part loses the rest.
    pub(super) fn note_objects(&mut self) {
        loop {
            let (mut left, mut unwanted) = (Vec::new(), Vec::new());
            for store in self.stores.iter_mut().filter(|store| store.objects) {
                let Some(class) = Class::of(store.layout()) else { continue };
                for change in store.pool.take_changes() {
                    match change {
                        Change::Stored(place) => {
                            // One that was removed again within the same input has no slot; its removal follows.
                            let Some(slot) = store.pool.find(&place.key) else { continue };
                            let head = place.position == 0;
                            if head && self.cluster.book().hints.was_removed(&place.key, &place.parent) {
                                // It was on its way here when it was removed from all nodes.
                                unwanted.push((store.region, slot));
                                continue;
                            }
                            self.objects.catalog.insert(place.key, class, head, (store.region, slot));
                            if head {
                                let (key, value, class) = (place.key, place.parent, class.number());
                                self.cluster.note(Head { key, value, class }, true);
                            }
                        }
                        Change::Removed(key) => {
                            self.objects.catalog.left_dram(&key);
                            left.push(key);
                        }
                    }
                }
            }
            for key in &left {
                self.object_left(key);
            }
            let gone = mem::take(&mut self.objects.gone);
            if gone.is_empty() && unwanted.is_empty() {
                return;
            }
            for block in unwanted {
                self.unpublish(block);
            }
            for key in gone {
                self.kept_is_gone(&key);
                if let Some((client, put)) = self.objects.parts.remove(&key) {
                    let puts = self.objects.puts.get_mut(&client);
                    puts.and_then(|puts| puts.get_mut(&put)).into_iter().for_each(|put| put.broken = true);
                    continue;
                }
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

    /// Drops a block from all media of this node. True if one had it.
    pub(super) fn forget_block(&mut self, key: &BlockKey) -> bool {
        let Some(entry) = self.objects.catalog.find(key) else { return false };
        self.let_leave(key);
        self.call_off(key);
        self.remove_object_from_tier(key);
        entry.dram.is_none_or(|at| self.unpublish(at))
    }

    fn unpublish(&mut self, (region, slot): At) -> bool {
        let mut stores = self.stores.iter_mut();
        stores.find(|store| store.region == region).is_some_and(|store| store.pool.unpublish(slot))
    }

    /// The blocks of an object behind its head.
    pub(super) fn object_chunks(&self, head: &BlockKey) -> &[BlockKey] {
        self.objects.chunks.get(head).map_or(&[], Vec::as_slice)
    }

    /// Where the blocks of an object lie. For tests.
    pub fn find_object(&self, key: &BlockKey) -> Option<Medium> {
        self.objects.catalog.find(key).map(|entry| entry.medium())
    }

    pub(super) fn check_objects(&self) {
        let catalog = &self.objects.catalog;
        let mut lying = BTreeSet::new();
        for store in self.stores.iter().filter(|store| store.objects) {
            for place in store.pool.published() {
                let slot = store.pool.find(&place.key).expect("a published block is found");
                let entry = catalog.find(&place.key).expect("a published block is known");
                assert_eq!((entry.dram, entry.head), (Some((store.region, slot)), place.position == 0), "{place:?}");
                assert!(lying.insert(place.key));
            }
        }
        let keys = catalog.keys();
        for key in &keys {
            let entry = catalog.find(key).expect("a key of the catalog");
            assert!(entry.dram.is_none() || lying.contains(key), "the catalog has what is not there");
            assert!(entry.dram.is_some() || entry.ssd || self.is_being_written(key), "{key:?} is nowhere");
        }
        let mut heads: HashMap<BlockKey, BlockKey> = HashMap::new();
        for (head, chunks) in &self.objects.chunks {
            for key in chunks.iter().chain([head]) {
                assert!(keys.contains(key), "an object with a part missing");
            }
            heads.extend(chunks.iter().map(|chunk| (*chunk, *head)));
        }
        assert_eq!(self.objects.heads, heads, "chunks and heads");
        for (key, (client, put)) in &self.objects.parts {
            let put = self.objects.puts.get(client).and_then(|puts| puts.get(put));
            let block = put.and_then(|put| put.blocks.values().find(|block| block.key == *key));
            assert!(block.is_some_and(|block| block.committed), "{key:?} is of no put");
        }
        let is_head = |key: &&BlockKey| catalog.find(key).is_some_and(|entry| entry.head);
        let mut parts = keys.iter().filter(|key| !is_head(key));
        let loose = parts.find(|key| !heads.contains_key(*key) && !self.objects.parts.contains_key(*key));
        assert_eq!(loose, None, "a part of no object");
        self.check_brings();
        self.check_held();
    }
}
