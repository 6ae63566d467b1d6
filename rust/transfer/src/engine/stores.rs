//! The pools of all layouts that are in use, over one amount of memory.
//!
//! ```text
//!                 grows: from what nobody has, then from whoever has what was used longest ago
//!   dram_bytes ------------------------------------------------------------> store: arena + pool of one layout
//!              <------------------------------------------------------------
//!                 gives up: empty slots, then its coldest blocks, never one that is held; the pages go back to the system
//! ```
//!
//! Each store has an arena of its own, so that a client maps the blocks of its layout and nothing else, and memory moves
//! between layouts page by page, with no holes. What all stores have never adds up to more than `dram_bytes`, and none has
//! less than two slots for long: with one for whoever waits and one for staging, each goes on by itself.
//!
//! Who waits for room is served in the order of arrival, over all stores: while somebody waits, those who came later get
//! nothing but what their own store has, and what becomes free goes to him.

use std::cmp::Reverse;
use std::ops::Range;
use std::sync::Arc;

use crate::error::Error;
use crate::memory::{ARENA_BYTES, Arena, slot_bytes};
use crate::messages::{GrantMode, GrantedSlot, Refusal};
use crate::objects::classes::Class;
use crate::pool::account::Accounts;
use crate::pool::policy::{Policy, cost::Costs};
use crate::pool::{Granting, Holder, Lack, More, Occupancy, Pool, Wish};
use crate::types::{BlockKey, ClientId, Layout, Nanos, RegionId, SlotRef, Tag};

/// Slots that every store has, or is given before anybody gets any.
const MINIMUM: u32 = 2;

/// Part of the memory by which a store grows at most, if it needs no more: a store that is still empty knows of few slots.
const STEPS: u64 = 16;

/// The blocks of one layout.
pub(super) struct Store {
    pub arena: Arc<Arena>,
    pub pool: Pool<Arc<Arena>>,
    /// The number of the arena, here and in what is said to peers.
    pub region: RegionId,
    /// Its blocks are objects: the conductor hears nothing of them.
    pub objects: bool,
    slot_bytes: u64,
}

impl Store {
    pub fn layout(&self) -> Layout {
        self.arena.layout()
    }

    fn bytes(&self) -> u64 {
        u64::from(self.pool.size()) * self.slot_bytes
    }

    /// How many slots others may take from it.
    fn givable(&self) -> usize {
        self.pool.givable().min(self.pool.size().saturating_sub(MINIMUM) as usize)
    }
}

/// The memory that stores share. (The head of the first arena is within `dram_bytes`; those of further ones, a page each,
/// are not counted.)
struct Budget {
    limit: u64,
    /// All stores' slots.
    granted: u64,
    /// Inputs so far.
    turn: u64,
    /// Bytes of arenas that were given back.
    released: Vec<(RegionId, Range<u64>)>,
}

/// All stores, in the order in which their layouts came; none ever goes.
pub(super) struct Stores {
    all: Vec<Store>,
    budget: Budget,
    waiting_limit: usize,
    ended_limit: usize,
    eviction: &'static Policy,
    accounts: Arc<Accounts>,
}

impl Stores {
    /// None yet. The limits are those of each pool.
    pub fn new(dram_bytes: u64, waiting_limit: usize, ended_limit: usize, eviction: &'static Policy) -> Self {
        let budget =
            Budget { limit: dram_bytes.saturating_sub(ARENA_BYTES), granted: 0, turn: 0, released: Vec::new() };
        let accounts = Accounts::new(&[]);
        Self { all: Vec::new(), budget, waiting_limit, ended_limit, eviction, accounts }
    }

    /// Owners have these accounts, in all stores that come.
    pub fn tell_apart(&mut self, accounts: Arc<Accounts>) {
        assert!(self.all.is_empty(), "accounts are there before the first block");
        self.accounts = accounts;
    }

    /// What owners have, and may have.
    pub fn accounts(&self) -> &Accounts {
        &self.accounts
    }

    /// The store of a layout; makes it if it is new. Returns also who waited elsewhere for more than there can be now.
    ///
    /// # Errors
    /// Give up: what to do.
    pub fn attach(&mut self, layout: Layout, now: Nanos) -> Result<(usize, Vec<Holder>), Error> {
        if let Some(at) = self.all.iter().position(|store| store.layout() == layout) {
            return Ok((at, Vec::new()));
        }
        let (at, slot_bytes) = (self.all.len(), slot_bytes(layout)?);
        if at >= RegionId::ARENAS as usize {
            return Err(Error::give_up(format!(
                "this node has blocks of {at} layouts, which is all it can have: restart its daemon to forget them"
            )));
        }
        let least = |slot_bytes| u64::from(MINIMUM) * slot_bytes;
        let all = self.all.iter().map(|store| least(store.slot_bytes)).sum::<u64>() + least(slot_bytes);
        if all > self.budget.limit {
            let block = layout.block_bytes();
            let others = if at > 0 { " besides those of other layouts" } else { "" };
            return Err(Error::give_up(format!(
                "{} bytes of memory do not hold {MINIMUM} blocks of {block} bytes{others}: give at least {} with --dram-bytes",
                self.budget.limit + ARENA_BYTES,
                all + ARENA_BYTES
            )));
        }
        // The file has room for all that this layout could ever have.
        let make = if at == 0 { Arena::create } else { Arena::sparse };
        let arena = make(self.budget.limit + ARENA_BYTES, layout)?;
        let region = RegionId(at as u32);
        let policy = self.eviction.make(&Costs::default());
        let mut pool = Pool::new(arena.clone(), 0, self.waiting_limit, self.ended_limit, policy);
        let eviction = self.eviction;
        pool.tell_apart(self.accounts.clone(), slot_bytes, move || eviction.make(&Costs::default()));
        pool.turn(self.budget.turn, now);
        let objects = Class::of(layout).is_some();
        self.all.push(Store { arena, pool, region, objects, slot_bytes });
        let mut never = Vec::new();
        for at in 0..self.all.len() {
            let limit = self.most(at);
            never.append(&mut self.all[at].pool.set_limit(limit));
        }
        self.owed();
        Ok((at, never))
    }

    /// Most slots that a store could have, if all others had as few as they may.
    fn most(&self, at: usize) -> u32 {
        let others = self.all.iter().enumerate().filter(|(other, _)| *other != at);
        let others: u64 = others.map(|(_, store)| u64::from(MINIMUM) * store.slot_bytes).sum();
        let Store { arena, slot_bytes, .. } = &self.all[at];
        let slots = self.budget.limit.saturating_sub(others) / slot_bytes;
        u32::try_from(slots).unwrap_or(u32::MAX).min(arena.slots())
    }

    /// Called before every input.
    pub fn turn(&mut self, now: Nanos) {
        self.budget.turn += 1;
        self.all.iter_mut().for_each(|store| store.pool.turn(self.budget.turn, now));
    }

    pub fn get(&self, at: usize) -> Option<&Store> {
        self.all.get(at)
    }

    pub fn get_mut(&mut self, at: usize) -> Option<&mut Store> {
        self.all.get_mut(at)
    }

    pub fn iter(&self) -> impl Iterator<Item = &Store> {
        self.all.iter()
    }

    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut Store> {
        self.all.iter_mut()
    }

    /// How many slots of what no store has this one could have.
    pub fn unused(&self, at: usize) -> usize {
        let slot_bytes = self.all.get(at).map_or(u64::MAX, |store| store.slot_bytes);
        ((self.budget.limit - self.budget.granted) / slot_bytes) as usize
    }

    /// The store of a layout, if there is one.
    pub fn of(&self, layout: Layout) -> Option<usize> {
        self.all.iter().position(|store| store.layout() == layout)
    }

    // -- what needs room ---------------------------------------------------------------------------------------------

    pub fn grant(&mut self, at: usize, holder: Holder, wish: Wish, mode: GrantMode) -> Granting {
        self.with_more(at, |pool, more| pool.grant_with(holder, wish, mode, more))
    }

    /// A slot for what the node itself does, see [`Pool::grant_own`].
    pub fn grant_own(&mut self, at: usize, holder: Holder, wish: Wish) -> Granting {
        self.with_more(at, |pool, more| pool.grant_own(holder, wish, more))
    }

    pub fn lookup(&mut self, at: usize, holder: Holder, keys: &[BlockKey]) -> Vec<SlotRef> {
        self.with_more(at, |pool, more| pool.lookup_with(holder, keys, more))
    }

    /// Grants what fits now: who has waited longest is first.
    pub fn advance(&mut self) -> Vec<(Holder, Vec<GrantedSlot>)> {
        self.all.iter_mut().for_each(|store| store.pool.sweep());
        self.owed();
        let mut waiting: Vec<(u64, usize)> = Vec::new();
        waiting.extend((0..).zip(&self.all).filter_map(|(at, store)| Some((store.pool.waits_since()?, at))));
        waiting.sort_unstable();
        let mut granted = Vec::new();
        for (_, at) in waiting {
            granted.extend(self.with_more(at, |pool, more| pool.advance_with(more)));
        }
        granted
    }

    /// Gives every store its minimum, as far as somebody can do without.
    fn owed(&mut self) {
        for at in 0..self.all.len() {
            let wanted = MINIMUM.saturating_sub(self.all[at].pool.size()) as usize;
            if wanted > 0 {
                self.with_more(at, |pool, more| more(pool, Lack { wanted, needed: 1, since: 0, over: None }));
            }
        }
    }

    fn with_more<R>(&mut self, at: usize, act: impl FnOnce(&mut Pool<Arc<Arena>>, More<'_, Arc<Arena>>) -> R) -> R {
        let Self { all, budget, .. } = self;
        let (before, rest) = all.split_at_mut(at);
        let (store, after) = rest.split_first_mut().expect("stores never go");
        let (slot_bytes, most) = (store.slot_bytes, store.arena.slots());
        let mut more = |pool: &mut Pool<Arc<Arena>>, lack: Lack| {
            let mut others: Vec<&mut Store> = before.iter_mut().chain(after.iter_mut()).collect();
            budget.more(pool, slot_bytes, most, &mut others, lack);
        };
        act(&mut store.pool, &mut more)
    }

    /// Makes a reserved block readable, see [`Pool::commit`]. A key is published by one store only.
    pub fn commit(&mut self, at: usize, holder: Holder, index: u32, by: Option<Holder>) -> Result<(), Refusal> {
        let key = self.all.get(at).ok_or(Refusal::Protocol)?.pool.key_at(holder, index);
        let mut others = self.all.iter().enumerate().filter(|(other, _)| *other != at);
        let elsewhere = key.is_some_and(|key| others.any(|(_, store)| store.pool.find(&key).is_some()));
        self.all[at].pool.commit_as(holder, index, by, !elsewhere)
    }

    // -- asking ------------------------------------------------------------------------------------------------------

    /// The store in which a tag was granted, or waits to be, and the client that asked for it.
    pub fn granted_to(&self, tag: Tag) -> Option<(usize, ClientId)> {
        self.all.iter().enumerate().find_map(|(at, store)| Some((at, store.pool.granted_to(tag)?)))
    }

    /// True if the tag has ended and is still remembered.
    pub fn has_ended(&self, tag: Tag) -> bool {
        self.all.iter().any(|store| store.pool.has_ended(tag))
    }

    /// Slots by state. What no store has yet counts as free, in blocks of the largest layout.
    pub fn occupancy(&self) -> Occupancy {
        let mut sum = Occupancy::default();
        for store in &self.all {
            let Occupancy { free, cached, pinned, reserved, quarantine } = store.pool.occupancy();
            sum.free += free;
            sum.cached += cached;
            sum.pinned += pinned;
            sum.reserved += reserved;
            sum.quarantine += quarantine;
        }
        if let Some(largest) = self.all.iter().map(|store| store.slot_bytes).max() {
            let unused = (self.budget.limit - self.budget.granted) / largest;
            sum.free = sum.free.saturating_add(u32::try_from(unused).unwrap_or(u32::MAX));
        }
        sum
    }

    /// Number and XOR of the published keys that the conductor hears of.
    pub fn digest(&self) -> (u64, [u8; 16]) {
        self.all.iter().filter(|store| !store.objects).fold((0, [0; 16]), |(count, mut xor), store| {
            let (its, BlockKey(key)) = store.pool.digest();
            xor.iter_mut().zip(key).for_each(|(sum, byte)| *sum ^= byte);
            (count + its, xor)
        })
    }

    /// Bytes of arenas that were given back since the last call.
    pub fn take_released(&mut self) -> Vec<(RegionId, Range<u64>)> {
        std::mem::take(&mut self.budget.released)
    }

    /// Asserts every invariant.
    ///
    /// # Panics
    /// If one does not hold.
    pub fn check(&self) {
        let mut charged = std::collections::HashMap::new();
        for (account, bytes) in self.all.iter().flat_map(|store| store.pool.charged()) {
            *charged.entry(account).or_default() += bytes;
        }
        self.accounts.check(&charged);
        let Budget { limit, granted, .. } = self.budget;
        assert_eq!(granted, self.all.iter().map(Store::bytes).sum::<u64>(), "bytes of all stores");
        assert!(granted <= limit, "stores have {granted} bytes of {limit}");
        let mut keys = std::collections::HashSet::new();
        for (at, store) in self.all.iter().enumerate() {
            assert_eq!(store.region, RegionId(at as u32), "a store has another's number");
            store.pool.check();
            for place in store.pool.published() {
                assert!(keys.insert(place.key), "{:?} is published by two stores", place.key);
            }
        }
    }
}

impl Budget {
    /// Gives slots to a pool, see [`More`].
    fn more(
        &mut self,
        pool: &mut Pool<Arc<Arena>>,
        slot_bytes: u64,
        most: u32,
        others: &mut [&mut Store],
        Lack { mut wanted, mut needed, since, over }: Lack,
    ) {
        if let Some((account, mut bytes)) = over {
            for store in others.iter_mut() {
                while bytes > 0 && store.pool.evict_of(account) {
                    bytes = bytes.saturating_sub(store.slot_bytes);
                }
            }
            return;
        }
        let owes = |store: &&mut Store| store.pool.size() < MINIMUM;
        let waits = |store: &&mut Store| store.pool.waits_since().is_some_and(|other| other < since);
        if since > 0 && others.iter().any(|store| owes(store) || waits(store)) {
            return;
        }
        // From what nobody has: in steps, so that not every block asks.
        let step = u64::from(pool.size()).min(self.limit / STEPS / slot_bytes);
        let room = ((self.limit - self.granted) / slot_bytes).min(u64::from(most - pool.size().min(most)));
        let grown = step.max(wanted as u64).min(room);
        self.grow(pool, slot_bytes, grown);
        wanted = wanted.saturating_sub(grown as usize);
        needed = needed.saturating_sub(grown as usize);
        // Whoever waits already keeps what he can get of what he needs; a new one takes all of it or nothing.
        let new = since >= self.turn;
        let givable = others.iter().map(|store| store.givable() as u64 * store.slot_bytes).sum::<u64>();
        if new && ((self.limit - self.granted) + givable) / slot_bytes < needed as u64 {
            return;
        }
        let mut given: Vec<Vec<u32>> = vec![Vec::new(); others.len()];
        // What these would give next is being read, and free later.
        let mut busy = vec![false; others.len()];
        while wanted > 0 && pool.size() < most {
            let giving = others.iter().enumerate().filter(|(from, store)| store.givable() > 0 && !busy[*from]);
            // An empty slot costs nothing, so it is the coldest of all. Who has too much for his share gives before others.
            let cold =
                |store: &Store| (store.pool.empty() == 0, Reverse(store.pool.weight()), store.pool.coldest_use());
            let Some((coldest, from)) = giving.map(|(from, store)| (cold(store), from)).min() else { break };
            if needed == 0 && (true, Reverse(pool.weight()), pool.coldest_use()) <= coldest {
                break;
            }
            match others[from].pool.give_up() {
                Some(slot) => {
                    given[from].push(slot);
                    self.granted -= others[from].slot_bytes;
                }
                None => busy[from] = true,
            }
            let grown = ((self.limit - self.granted) / slot_bytes).min(wanted as u64);
            self.grow(pool, slot_bytes, grown);
            wanted -= grown as usize;
            needed = needed.saturating_sub(grown as usize);
        }
        for (store, mut slots) in others.iter_mut().zip(given) {
            // Before anything else is written: a slot may come back to where it was.
            store.arena.release(&slots);
            slots.sort_unstable();
            let of = |slot| store.arena.offset_of(slot, 0);
            let runs = slots.chunk_by(|one, next| one + 1 == *next);
            self.released.extend(runs.map(|run| (store.region, of(run[0])..of(run[run.len() - 1] + 1))));
        }
    }

    fn grow(&mut self, pool: &mut Pool<Arc<Arena>>, slot_bytes: u64, count: u64) {
        // `count` is within the arena, whose slots are numbered by 32 bits.
        pool.grow(count as u32);
        self.granted += count * slot_bytes;
    }
}
