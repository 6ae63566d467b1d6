//! The blocks of one layout, as bookkeeping over slot numbers: what lies where, for whom, and what may go.
//!
//! ```text
//!            grant                 commit                   last reference gone
//!   Free ------------> Reserved ------------> Committed ---------------------------> evictable (stays readable)
//!    ^                    |                   |       |                                   |
//!    |   quiet            | end               | private, duplicate or corrupt,           | room is needed
//!    +------ Quarantine <-+-------------------+ last reference gone  <--------------------+
//! ```
//!
//! A pool has some slots of its own, and may get more or give some up: the node's memory is shared by the pools of all
//! layouts (`engine/stores.rs`). The numbers it has given up are `Absent`; all other numbers below its highest one are its.
//!
//! A slot leaves `Quarantine` when nobody can write it any more: no hold of this process is out on it and every local
//! client that was told of it as a writer has let go. No bytes are touched here; the memory behind the numbers is the
//! [`Lives`] seam.

pub mod account;
mod check;
mod classes;
pub mod disk;
mod ended;
mod index;
pub mod model;
pub mod null;
pub mod policy;
mod quota;
mod room;
mod share;
mod slot;
pub mod tier;
pub mod twin;

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::sync::Arc;

use rustc_hash::FxHashSet;

use crate::memory::Arena;
use crate::messages::{GrantMode, GrantedSlot, Refusal};
use crate::types::{BlockKey, ClientId, Owner, SlotRef, Tag};

use account::{Account, Accounts, Name};
pub use ended::Remembered;
use index::Index;
use policy::{Evict, Gone};
use quota::Short;
use room::Room;
pub use slot::COPIES_AT_ONCE;
use slot::{FreeList, Owners, Slot, State};

/// What the pool needs of the memory behind its slot numbers.
pub trait Lives {
    /// Begins a new life of a quiet slot, open for writing.
    fn issue(&self, slot: u32) -> SlotRef;
    /// Ends writing, allows reading. False if somebody is writing.
    fn seal(&self, slot: SlotRef) -> bool;
    /// Ends the life.
    fn retire(&self, slot: SlotRef);
    /// True if nobody in this process touches the slot.
    fn quiet(&self, slot: u32) -> bool;
}

impl Lives for Arc<Arena> {
    fn issue(&self, slot: u32) -> SlotRef {
        Arena::issue(self, slot)
    }

    fn seal(&self, slot: SlotRef) -> bool {
        Arena::seal(self, slot)
    }

    fn retire(&self, slot: SlotRef) {
        Arena::retire(self, slot);
    }

    fn quiet(&self, slot: u32) -> bool {
        Arena::quiet(self, slot)
    }
}

/// Who holds references: a local client, or the daemon itself (replication), under a tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Holder {
    /// `None`: the daemon itself.
    pub client: Option<ClientId>,
    /// Chosen by the holder.
    pub tag: Tag,
}

/// What a holder asks room for: one slot per key, plus `private` 0 or 1.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wish {
    /// Full blocks in prefix order.
    pub keys: Vec<BlockKey>,
    /// One more slot, with no key?
    pub private: bool,
    /// Key before `keys[0]`.
    pub parent: BlockKey,
    /// Index of `keys[0]` in its prefix.
    pub position: u32,
    /// Whose the blocks will be.
    pub owner: Owner,
}

impl Wish {
    fn slots(&self) -> usize {
        self.keys.len() + usize::from(self.private)
    }

    fn place(&self, index: usize) -> Place {
        let parent = if index == 0 { self.parent } else { self.keys[index - 1] };
        Place { key: self.keys[index], parent, position: self.position + index as u32 }
    }
}

/// Answer to a wish.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Granting {
    /// The slots, in order.
    Held(Vec<GrantedSlot>),
    /// In the queue; [`Pool::advance`] will return it.
    Waiting,
    /// Never, or not now.
    Refused(Refusal),
}

/// A published block: its key and where it stands in its prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The block.
    pub key: BlockKey,
    /// The block before it.
    pub parent: BlockKey,
    /// Its index in the prefix.
    pub position: u32,
}

/// What changed in the set of published blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// A block became readable to all.
    Stored(Place),
    /// It is no longer.
    Removed(BlockKey),
}

/// Numbers of slots by state; they add up to the pool's size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Occupancy {
    /// Empty.
    pub free: u32,
    /// Published and evictable.
    pub cached: u32,
    /// Committed and referenced.
    pub pinned: u32,
    /// Reserved, wanted.
    pub reserved: u32,
    /// Not proven quiet yet.
    pub quarantine: u32,
}

/// What happened so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Keys found by grants and lookups.
    pub hits: u64,
    /// Keys not found.
    pub misses: u64,
    /// Blocks removed to make room.
    pub evictions: u64,
    /// Those of them that were on no other medium.
    pub dropped: u64,
}

/// A published block, as a walk over the slots finds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Published {
    /// Where it lies.
    pub slot: SlotRef,
    /// Which it is.
    pub place: Place,
    /// Whose it is.
    pub owner: Owner,
    /// Somebody holds it, or it is being copied.
    pub held: bool,
}

/// What has become of a block that was to be dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Dropped {
    /// It is not published here.
    Missing,
    /// It stays: somebody holds it, or it is being copied.
    Held,
    /// Nobody finds it any more, and its slot is free, or will be when who reads it is done.
    Now,
}

/// A grant that waits.
#[derive(Clone, Debug)]
struct Waiting {
    holder: Holder,
    wish: Wish,
    mode: GrantMode,
    /// When it began to, in turns: orders it among those of other pools.
    since: u64,
    /// It waits for slots of its own account, so that nobody else need wait for it: since that was stirred last.
    blocked: Option<u64>,
}

/// What a pool lacks to serve somebody.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lack {
    /// So many more free slots, and no block need be evicted.
    pub wanted: usize,
    /// Without so many more it cannot be served at all.
    pub needed: usize,
    /// Since when it waits, in turns.
    pub since: u64,
    /// Or so many bytes less of other pools, in blocks of an account that has all it may.
    pub over: Option<(Account, u64)>,
}

/// Gives a pool slots that others can do without, by [`Pool::grow`]; as many as are to be had, and needed ones all or none.
pub type More<'a, M> = &'a mut dyn FnMut(&mut Pool<M>, Lack);

#[derive(Clone, Debug, Default)]
struct Held {
    /// Slots of the grant, in order.
    grant: Option<Vec<u32>>,
    /// Slots pinned by lookups, in order, none twice.
    looked: Vec<u32>,
}

/// Slots that a grant must leave to others: whoever may wait for something else while it holds slots leaves one for
/// staging.
fn spare(mode: GrantMode) -> usize {
    match mode {
        GrantMode::Wait | GrantMode::Now => 1,
        GrantMode::Staging => 0,
    }
}

/// The pool of one layout. Every operation leaves [`Pool::check`] true.
#[derive(Debug)]
pub struct Pool<M: Lives> {
    memory: M,
    slots: Vec<Slot>,
    free: FreeList,
    /// Given up, to be had again first.
    absent: Vec<u32>,
    /// Most slots it can ever have.
    limit: u32,
    /// Turns so far, and the time of the last one, coarse.
    turn: (u64, u32),
    index: Index,
    owners: Owners,
    room: Room,
    quarantine: BTreeSet<u32>,
    /// Slots that are read in place, by holds of the memory alone, see [`Pool::noticed`].
    viewed: BTreeSet<u32>,
    held: HashMap<Holder, Held>,
    /// Which client was granted a tag (or waits for it).
    granted: HashMap<Tag, ClientId>,
    /// In the order of granting: staging ones first, each kind in arrival order.
    waiting: VecDeque<Waiting>,
    waiting_limit: usize,
    /// Slots that a local client may write though another one holds them.
    writers: HashMap<Holder, HashSet<u32>>,
    /// Those of the holders who have taken slots for the node itself.
    own: FxHashSet<Holder>,
    /// Accounts that may have got more than they may.
    overdrawn: BTreeSet<Account>,
    ended: Remembered<Tag>,
    changes: Vec<Change>,
    /// Slots that a grant took lately, see `demand`.
    demand: usize,
    /// Slots of published blocks that were found since the last call of `take_hits`, if anybody asks.
    hits: Option<Vec<u32>>,
    xor: [u8; 16],
    tally: Tally,
}

impl<M: Lives> Pool<M> {
    /// A pool of `slots` free slots. At most `waiting_limit` grants wait; `ended_limit` ended tags are remembered;
    /// `policy` says what goes first when room is needed.
    pub fn new(memory: M, slots: u32, waiting_limit: usize, ended_limit: usize, policy: Box<dyn Evict>) -> Self {
        let mut all = vec![Slot::new(); slots as usize];
        let mut free = FreeList::new();
        (0..slots).rev().for_each(|slot| free.push(&mut all, slot));
        Self {
            memory,
            slots: all,
            free,
            absent: Vec::new(),
            limit: slots,
            turn: (0, 0),
            index: Index::default(),
            owners: Owners::new(Accounts::new(&[]), 0),
            room: Room::new(policy),
            quarantine: BTreeSet::new(),
            demand: 0,
            viewed: BTreeSet::new(),
            held: HashMap::new(),
            granted: HashMap::new(),
            waiting: VecDeque::new(),
            waiting_limit,
            writers: HashMap::new(),
            own: FxHashSet::default(),
            overdrawn: BTreeSet::new(),
            ended: Remembered::new(ended_limit),
            changes: Vec::new(),
            hits: None,
            xor: [0; 16],
            tally: Tally::default(),
        }
    }

    // -- taking ------------------------------------------------------------------------------------------------------

    /// Reserves or pins all slots of a wish, or none of them.
    pub fn grant(&mut self, holder: Holder, wish: Wish, mode: GrantMode) -> Granting {
        self.grant_with(holder, wish, mode, &mut |_, _| {})
    }

    /// As `grant`; asks for more slots where it has too few.
    pub fn grant_with(&mut self, holder: Holder, wish: Wish, mode: GrantMode, more: More<'_, M>) -> Granting {
        if holder.client.is_some() && self.ended.contains(&holder.tag) {
            return Granting::Refused(Refusal::Ended);
        }
        let taken = self.granted.contains_key(&holder.tag) && holder.client.is_some();
        let granted = self.held.get(&holder).is_some_and(|held| held.grant.is_some());
        let distinct: FxHashSet<_> = wish.keys.iter().collect();
        let overflow = u32::try_from(wish.keys.len()).ok().and_then(|n| wish.position.checked_add(n)).is_none();
        if taken || granted || distinct.len() != wish.keys.len() || overflow {
            return Granting::Refused(Refusal::Protocol);
        }
        if wish.slots() + spare(mode) > self.largest(wish.owner) {
            return Granting::Refused(Refusal::TooLarge);
        }
        // Nobody overtakes the head of the queue, but a wish that takes no room is in nobody's way.
        let present = wish.keys.iter().filter(|key| self.at(key).is_some()).count();
        let mut blocked = self.waits_with_its_own(wish.owner).then_some(0);
        if self.is_next(wish.owner, mode) || present == wish.slots() {
            match self.try_grant(holder, &wish, mode, self.turn.0, more) {
                Ok(slots) => return Granting::Held(slots),
                Err(short) => blocked = self.blocked_by(short, wish.owner),
            }
        }
        if mode == GrantMode::Now || self.waiting.len() >= self.waiting_limit {
            return Granting::Refused(Refusal::Full);
        }
        if let Some(client) = holder.client {
            self.granted.insert(holder.tag, client);
        }
        let place = match mode {
            GrantMode::Staging => self.staging(),
            GrantMode::Wait | GrantMode::Now => self.waiting.len(),
        };
        self.waiting.insert(place, Waiting { holder, wish, mode, since: self.turn.0, blocked });
        Granting::Waiting
    }

    /// As `grant_with`, one slot at once or not at all, for what the node itself does for others. So that it goes on while
    /// somebody waits for room, it may overtake him with a few slots, unless he could never be served beside them.
    pub fn grant_own(&mut self, holder: Holder, wish: Wish, more: More<'_, M>) -> Granting {
        let few = (self.limit / OWN_SHARE).clamp(1, OWN_LIMIT) as usize;
        let beside = |first: &Waiting| first.wish.slots() + spare(first.mode) + few <= self.limit as usize;
        let overtakes = wish.slots() == 1 && self.own.len() < few && self.first_unblocked().is_some_and(beside);
        let granting = if overtakes && self.granted(holder).is_none() {
            let slots = self.try_grant(holder, &wish, GrantMode::Now, self.turn.0, more);
            slots.map_or(Granting::Refused(Refusal::Full), Granting::Held)
        } else {
            self.grant_with(holder, wish, GrantMode::Now, more)
        };
        if matches!(granting, Granting::Held(_)) {
            self.own.insert(holder);
        }
        granting
    }

    /// Who of those that wait for room is the first.
    fn first_unblocked(&self) -> Option<&Waiting> {
        self.waiting.iter().find(|waiting| waiting.blocked.is_none())
    }

    /// How many staging grants wait: they are first.
    fn staging(&self) -> usize {
        self.waiting.iter().take_while(|waiting| waiting.mode == GrantMode::Staging).count()
    }

    /// Grants what fits now, in arrival order. Call after anything was released.
    pub fn advance(&mut self) -> Vec<(Holder, Vec<GrantedSlot>)> {
        self.advance_with(&mut |_, _| {})
    }

    /// As `advance`; asks for more slots where it has too few.
    pub fn advance_with(&mut self, more: More<'_, M>) -> Vec<(Holder, Vec<GrantedSlot>)> {
        self.sweep();
        self.trim();
        let mut granted = Vec::new();
        // Who waits for slots of his own account lets others pass, but those of this account.
        let mut blocked: FxHashSet<Option<Name>> = FxHashSet::default();
        let mut at = 0;
        while let Some(next) = self.waiting.get_mut(at) {
            let name = self.owners.accounts.of(next.wish.owner);
            if blocked.contains(&name) {
                next.blocked = Some(0);
                at += 1;
                continue;
            }
            if next.blocked.is_some() && next.blocked == self.owners.accounts.stirred(next.wish.owner) {
                blocked.insert(name);
                at += 1;
                continue;
            }
            let Some(mut next) = self.waiting.remove(at) else { break };
            match self.try_grant(next.holder, &next.wish, next.mode, next.since, more) {
                Ok(slots) => granted.push((next.holder, slots)),
                Err(short) => {
                    next.blocked = self.blocked_by(short, next.wish.owner);
                    let goes_on = next.blocked.is_some();
                    self.waiting.insert(at, next);
                    if !goes_on {
                        break;
                    }
                    blocked.insert(name);
                    at += 1;
                }
            }
        }
        granted
    }

    /// All slots of a wish, or what it lacks.
    fn try_grant(
        &mut self,
        holder: Holder,
        wish: &Wish,
        mode: GrantMode,
        since: u64,
        more: More<'_, M>,
    ) -> Result<Vec<GrantedSlot>, Short> {
        if !self.apart() {
            return self.try_grant_to(account::EVERYBODY, holder, wish, mode, since, more);
        }
        let accounts = self.owners.accounts.clone();
        let account = accounts.enter(wish.owner);
        let outcome = self.try_grant_to(account, holder, wish, mode, since, more);
        accounts.leave(account);
        outcome
    }

    fn try_grant_to(
        &mut self,
        account: Account,
        holder: Holder,
        wish: &Wish,
        mode: GrantMode,
        since: u64,
        more: More<'_, M>,
    ) -> Result<Vec<GrantedSlot>, Short> {
        let present: Vec<Option<u32>> = wish.keys.iter().map(|key| self.at(key)).collect();
        let hits = present.iter().flatten().count();
        let need = wish.slots() - hits;
        let keeps = || present.iter().flatten().filter(|&&slot| self.slots[slot as usize].idle);
        let (kept, own) = (keeps().count(), keeps().filter(|&&slot| self.account(slot) == account).count());
        // What takes no room may be had even when there is none.
        let takes_room = need + kept > 0;
        if takes_room && !self.may_have(account, need + spare(mode), own, since, more) {
            return Err(Short::Limit);
        }
        // Charged already, so that room is made as if he had what he wants: who has the most then gives it.
        let bytes = need as u64 * self.owners.slot_bytes();
        let accounts = self.owners.accounts.clone();
        accounts.charge(account, bytes);
        let enough = |pool: &Self| !takes_room || need + spare(mode) <= pool.free.len() + pool.room.idle() - kept;
        if takes_room && (need > self.free.len() || !enough(self)) {
            let needed = (need + spare(mode)).saturating_sub(self.free.len() + self.room.idle() - kept);
            let wanted = need.saturating_sub(self.free.len()).max(needed);
            more(self, Lack { wanted, needed, since, over: None });
        }
        let mut short = (!enough(self)).then_some(Short::Room);
        if short.is_none() {
            // Pinned first, so that making room cannot take what is already here.
            present.iter().flatten().for_each(|&slot| self.pin(slot));
            short = if !self.make_own_room(account) {
                Some(Short::Limit)
            } else if !self.make_room(need) {
                Some(Short::Room)
            } else {
                None
            };
            if short.is_some() {
                present.iter().rev().flatten().for_each(|&slot| self.unpin(slot));
            }
        }
        accounts.discharge(account, bytes);
        if let Some(short) = short {
            return Err(short);
        }
        if need > 0 {
            self.demand = need.max(self.demand - self.demand / DEMAND_SHARE);
        }
        let mut slots = Vec::with_capacity(wish.slots());
        for index in 0..wish.slots() {
            let slot = match present.get(index) {
                Some(&Some(slot)) => slot,
                _ => {
                    let slot = self.free.pop(&self.slots).expect("make_room has freed enough");
                    let life = self.memory.issue(slot);
                    let place = (index < wish.keys.len()).then(|| wish.place(index));
                    let owner = wish.owner;
                    let owner = self.owners.add(owner);
                    self.slots[slot as usize] = Slot::reserved(life, place, owner);
                    slot
                }
            };
            slots.push(slot);
        }
        present.iter().flatten().for_each(|&slot| self.hit(slot));
        self.tally.hits += hits as u64;
        self.tally.misses += (wish.keys.len() - hits) as u64;
        let answer = slots.iter().map(|&slot| self.granted_slot(slot)).collect();
        self.held.entry(holder).or_default().grant = Some(slots);
        if let Some(client) = holder.client {
            self.granted.insert(holder.tag, client);
        }
        Ok(answer)
    }

    /// Evicts until `need` slots are free. False if victims turned out not to be quiet: they wait in quarantine. No more
    /// than `need` of those are evicted in vain.
    fn make_room(&mut self, need: usize) -> bool {
        let most = self.quarantine.len() + need;
        while self.free.len() < need {
            if self.quarantine.len() >= most {
                return false;
            }
            let Some(victim) = self.victim(None) else { return false };
            self.evict(victim);
        }
        true
    }

    fn evict(&mut self, victim: u32) {
        self.tally.evictions += 1;
        self.tally.dropped += u64::from(!self.slots[victim as usize].clean);
        self.unpublish_slot(victim, Gone::Evicted);
        self.discard(victim);
    }

    /// Pins the longest leading run of keys that is published, but never the last slot that could be had for staging.
    pub fn lookup(&mut self, holder: Holder, keys: &[BlockKey]) -> Vec<SlotRef> {
        self.lookup_with(holder, keys, &mut |_, _| {})
    }

    /// As `lookup`; asks for more slots rather than find less.
    pub fn lookup_with(&mut self, holder: Holder, keys: &[BlockKey], more: More<'_, M>) -> Vec<SlotRef> {
        // All at once first, and nothing else: so the processor waits for many of them at a time.
        let published: Vec<u32> = keys.iter().map_while(|key| self.at(key)).collect();
        let takes = published.iter().filter(|&&slot| self.slots[slot as usize].idle).count();
        let wanted = (takes + 1).saturating_sub(self.free.len() + self.room.idle());
        if takes > 0 && wanted > 0 {
            more(self, Lack { wanted, needed: 1, since: self.turn.0, over: None });
        }
        let mut available = self.free.len() + self.room.idle();
        let mut held = self.held.remove(&holder).unwrap_or_default();
        // What it looked up before: of those that somebody uses.
        let mut known: Option<FxHashSet<u32>> = None;
        let mut found = published;
        for at in 0..found.len() {
            let slot = found[at];
            let idle = self.slots[slot as usize].idle;
            if idle && (available <= 1 || !self.leaves_one(slot)) {
                found.truncate(at);
                break;
            }
            // Pinning once more what is pinned takes no room.
            available -= usize::from(idle);
            let known = if idle {
                known.as_mut()
            } else {
                Some(known.get_or_insert_with(|| held.looked.iter().copied().collect()))
            };
            if known.is_none_or(|known| known.insert(slot)) {
                held.looked.push(slot);
                self.pin(slot);
                self.hit(slot);
            }
        }
        self.tally.hits += found.len() as u64;
        self.tally.misses += (keys.len() - found.len()) as u64;
        if held.grant.is_some() || !held.looked.is_empty() {
            self.held.insert(holder, held);
        }
        found.iter().map(|&slot| self.life(slot)).collect()
    }

    /// Makes a reserved block readable: published, unless it is private or its key is published already.
    /// `by`: the client that wrote it, which promises to write it no more.
    ///
    /// # Errors
    /// `Protocol`: no such index. `Corrupt`: somebody is still writing it.
    pub fn commit(&mut self, holder: Holder, index: u32, by: Option<Holder>) -> Result<(), Refusal> {
        self.commit_as(holder, index, by, true)
    }

    /// As `commit`; `publish` false: it serves its holder only, whatever its key.
    ///
    /// # Errors
    /// As there.
    pub fn commit_as(&mut self, holder: Holder, index: u32, by: Option<Holder>, publish: bool) -> Result<(), Refusal> {
        let slot = self.granted_index(holder, index).ok_or(Refusal::Protocol)?;
        if let Some(writer) = by {
            self.forget_writer(writer, slot);
        }
        if !self.is(slot, State::Reserved) {
            return Ok(());
        }
        if !self.memory.seal(self.life(slot)) {
            return Err(Refusal::Corrupt);
        }
        let place = self.slots[slot as usize].place();
        let place = place.filter(|place| publish && self.at(&place.key).is_none());
        let record = &mut self.slots[slot as usize];
        record.state = State::Committed { published: place.is_some() };
        if let Some(place) = place {
            self.index.insert(&self.slots, slot);
            self.join(slot, place);
            self.mark(place.key);
            self.change(Change::Stored(place));
        }
        Ok(())
    }

    /// Gives a holder the published block of the key of one of its reserved slots, which goes back. `None`: it has no such
    /// slot, or the key is not published.
    pub fn adopt(&mut self, holder: Holder, index: u32) -> Option<SlotRef> {
        let own = self.granted_index(holder, index)?;
        let slot = self.at(&self.slots[own as usize].place()?.key)?;
        if slot != own {
            self.pin(slot);
            self.hit(slot);
            let grant = self.held.get_mut(&holder).and_then(|held| held.grant.as_mut());
            if let Some(place) = grant.and_then(|slots| slots.get_mut(index as usize)) {
                *place = slot;
            }
            self.unpin(own);
        }
        Some(self.life(slot))
    }

    /// Lets a local client write the uncommitted slots of somebody else's grant, until it commits them or lets go.
    pub fn add_writer(&mut self, holder: Holder, writer: Holder) {
        let reserved: Vec<u32> = self.grant_slots(holder).filter(|&slot| self.is(slot, State::Reserved)).collect();
        let known = self.writers.entry(writer).or_default();
        for slot in reserved {
            if known.insert(slot) {
                self.slots[slot as usize].writers += 1;
            }
        }
    }

    /// The writer has let go of everything (its `End`, or its proven death).
    pub fn remove_writer(&mut self, writer: Holder) {
        let mut slots: Vec<u32> = self.writers.get(&writer).into_iter().flatten().copied().collect();
        slots.sort_unstable();
        for slot in slots {
            self.forget_writer(writer, slot);
        }
        self.writers.remove(&writer);
    }

    fn forget_writer(&mut self, writer: Holder, slot: u32) {
        if self.writers.get_mut(&writer).is_some_and(|slots| slots.remove(&slot)) {
            self.slots[slot as usize].writers -= 1;
            self.settle(slot);
        }
    }

    /// A copy begins to read a committed block. False if that life is over or not committed.
    pub fn begin_copy(&mut self, slot: SlotRef) -> bool {
        let record = self.slots.get(slot.slot as usize);
        record.is_some_and(|record| matches!(record.state, State::Committed { .. })) && self.begin_copy_written(slot)
    }

    /// Ok if `begin_copy_written` would begin one now. Full: as many read it as can be counted, in 16 bits. Missing: the
    /// slot holds another block by now, or none.
    pub fn may_copy(&self, slot: SlotRef) -> Result<(), Refusal> {
        let record = self.slots.get(slot.slot as usize).filter(|record| record.generation == slot.generation);
        let held = record.filter(|record| matches!(record.state, State::Committed { .. } | State::Reserved));
        match held {
            None => Err(Refusal::Missing),
            Some(record) if record.reads == COPIES_AT_ONCE => Err(Refusal::Full),
            Some(_) => Ok(()),
        }
    }

    /// As `begin_copy`, also of strips of a reserved block that its holder has written.
    pub fn begin_copy_written(&mut self, slot: SlotRef) -> bool {
        if self.may_copy(slot).is_err() {
            return false;
        }
        self.slots[slot.slot as usize].reads += 1;
        // What a holder's copy reads is in use already: this one is for a peer.
        if self.wake(slot.slot) {
            self.hit(slot.slot);
        }
        true
    }

    /// The copy reads no more.
    pub fn end_copy(&mut self, slot: SlotRef) {
        self.slots[slot.slot as usize].reads -= 1;
        self.settle(slot.slot);
    }

    /// Somebody began, or ended, to read a published block in place, by a hold of the memory of which the pool was not
    /// told. A block that was taken counts as used, and as in use until no hold is out on it.
    pub fn noticed(&mut self, slot: SlotRef, taken: bool) {
        let Some(record) = self.slots.get(slot.slot as usize) else { return };
        if record.generation != slot.generation || !matches!(record.state, State::Committed { .. }) {
            return;
        }
        let published = record.state == State::Committed { published: true };
        let quiet = self.memory.quiet(slot.slot);
        if taken && published {
            self.wake(slot.slot);
            self.hit(slot.slot);
            if !quiet {
                self.viewed.insert(slot.slot);
            }
        } else if quiet {
            self.viewed.remove(&slot.slot);
        }
        self.settle(slot.slot);
    }

    /// Looks at all that is read in place: what ended may have gone unnoticed.
    pub fn look_at_views(&mut self) {
        for slot in self.viewed.iter().copied().collect::<Vec<_>>() {
            if self.memory.quiet(slot) {
                self.viewed.remove(&slot);
                self.settle(slot);
            }
        }
    }

    // -- letting go --------------------------------------------------------------------------------------------------

    /// Drops everything a holder has: waiting, reserved, pinned. True if it had or awaited a grant.
    pub fn release(&mut self, holder: Holder) -> bool {
        let before = self.waiting.len();
        self.waiting.retain(|waiting| waiting.holder != holder);
        let mut granted = self.waiting.len() != before;
        let held = self.held.remove(&holder).unwrap_or_default();
        self.own.remove(&holder);
        // From tail to head, so that the head of a prefix counts as used last.
        for &slot in held.looked.iter().rev().chain(held.grant.iter().flatten().rev()) {
            self.unpin(slot);
        }
        granted |= held.grant.is_some();
        if granted && holder.client.is_some() {
            self.granted.remove(&holder.tag);
        }
        granted
    }

    /// The tag is never granted again.
    pub fn end(&mut self, tag: Tag) {
        self.ended.insert(tag);
    }

    /// A block was found corrupt: nobody finds it any more; who holds it keeps its slot. True if it was published.
    pub fn unpublish(&mut self, slot: SlotRef) -> bool {
        let Some(record) = self.slots.get(slot.slot as usize) else { return false };
        if record.generation != slot.generation || !record.is_published() {
            return false;
        }
        self.unpublish_slot(slot.slot, Gone::Removed);
        self.settle(slot.slot);
        true
    }

    /// Drops a block that nobody holds.
    pub fn drop_block(&mut self, key: &BlockKey) -> Dropped {
        let Some(slot) = self.at(key) else { return Dropped::Missing };
        if !self.slots[slot as usize].idle {
            return Dropped::Held;
        }
        self.unpublish_slot(slot, Gone::Removed);
        self.settle(slot);
        Dropped::Now
    }

    /// Frees what in quarantine has become quiet.
    pub fn sweep(&mut self) {
        let quiet = |&slot: &u32| self.slots[slot as usize].writers == 0 && self.memory.quiet(slot);
        for slot in self.quarantine.iter().copied().filter(quiet).collect::<Vec<_>>() {
            self.quarantine.remove(&slot);
            self.slots[slot as usize].state = State::Free;
            self.free.push(&mut self.slots, slot);
        }
    }

    fn hit(&mut self, slot: u32) {
        let account = self.account(slot);
        self.room.classes.hit(account, slot);
        if let Some(hits) = &mut self.hits {
            hits.push(slot);
        }
    }

    fn pin(&mut self, slot: u32) {
        self.wake(slot);
        self.slots[slot as usize].pin(true);
    }

    fn unpin(&mut self, slot: u32) {
        self.slots[slot as usize].pin(false);
        self.settle(slot);
    }

    /// Decides what becomes of a slot after somebody has let go of it.
    fn settle(&mut self, slot: u32) {
        let record = &self.slots[slot as usize];
        if record.pins() > 0 || record.reads > 0 || self.viewed.contains(&slot) {
            return;
        }
        match record.state {
            State::Reserved | State::Committed { published: false } => self.discard(slot),
            State::Committed { published: true } if record.writers == 0 => self.rest(slot),
            State::Committed { published: true } | State::Quarantine | State::Free | State::Absent => {}
        }
    }

    fn discard(&mut self, slot: u32) {
        let record = &mut self.slots[slot as usize];
        self.memory.retire(SlotRef { slot, generation: record.generation });
        record.set_place(None);
        self.owners.remove(std::mem::replace(&mut record.owner, Owners::NOBODY));
        if record.writers == 0 && self.memory.quiet(slot) {
            record.state = State::Free;
            self.free.push(&mut self.slots, slot);
        } else {
            record.state = State::Quarantine;
            self.quarantine.insert(slot);
        }
    }

    fn unpublish_slot(&mut self, slot: u32, gone: Gone) {
        let record = &mut self.slots[slot as usize];
        record.state = State::Committed { published: false };
        record.clean = false;
        let place = record.place().expect("a published block has a place");
        self.index.remove(&self.slots, slot);
        self.leave(slot, place, gone);
        self.mark(place.key);
        self.change(Change::Removed(place.key));
    }

    fn change(&mut self, change: Change) {
        self.changes.push(change);
    }

    fn mark(&mut self, key: BlockKey) {
        self.xor.iter_mut().zip(key.0).for_each(|(sum, byte)| *sum ^= byte);
    }

    // -- asking ------------------------------------------------------------------------------------------------------

    /// Slots have numbers below this one.
    pub fn slots(&self) -> u32 {
        self.slots.len() as u32
    }

    /// How many copies read this slot.
    pub fn copies(&self, slot: u32) -> u32 {
        self.slots[slot as usize].reads.into()
    }

    fn at(&self, key: &BlockKey) -> Option<u32> {
        self.index.get(&self.slots, key)
    }

    /// The slot of a published block. Pins nothing.
    pub fn find(&self, key: &BlockKey) -> Option<SlotRef> {
        self.at(key).map(|slot| self.life(slot))
    }

    /// True if the tag has ended and is still remembered.
    pub fn has_ended(&self, tag: Tag) -> bool {
        self.ended.contains(&tag)
    }

    /// The client that was granted this tag, or waits for it.
    pub fn granted_to(&self, tag: Tag) -> Option<ClientId> {
        self.granted.get(&tag).copied()
    }

    /// The slots of a held grant as they are now.
    pub fn granted(&self, holder: Holder) -> Option<Vec<GrantedSlot>> {
        let slots = self.held.get(&holder)?.grant.as_ref()?;
        Some(slots.iter().map(|&slot| self.granted_slot(slot)).collect())
    }

    /// One slot of a held grant.
    pub fn granted_at(&self, holder: Holder, index: u32) -> Option<GrantedSlot> {
        self.granted_index(holder, index).map(|slot| self.granted_slot(slot))
    }

    /// What a slot of a held grant is to hold; `None` for a private block or no such slot.
    pub fn place_at(&self, holder: Holder, index: u32) -> Option<Place> {
        self.slots[self.granted_index(holder, index)? as usize].place()
    }

    /// The key of one slot of a held grant; `None` for a private block or no such slot.
    pub fn key_at(&self, holder: Holder, index: u32) -> Option<BlockKey> {
        self.place_at(holder, index).map(|place| place.key)
    }

    /// Whose block is in a slot.
    pub fn owner_of(&self, slot: SlotRef) -> Owner {
        self.owners.get(self.slots[slot.slot as usize].owner)
    }

    /// Says whose block a reserved slot of a held grant will hold.
    pub fn set_owner(&mut self, holder: Holder, index: u32, owner: Owner) {
        let Some(slot) = self.granted_index(holder, index) else { return };
        if self.slots[slot as usize].state != State::Reserved {
            return;
        }
        let owner = self.owners.add(owner);
        self.owners.remove(std::mem::replace(&mut self.slots[slot as usize].owner, owner));
        // It came for the node itself; he may have no room for it, and then has one block less of another.
        self.overdrawn.insert(self.owners.account(owner));
    }

    /// One slot that a lookup has pinned.
    pub fn looked_at(&self, holder: Holder, index: u32) -> Option<SlotRef> {
        let slot = *self.held.get(&holder)?.looked.get(index as usize)?;
        Some(self.life(slot))
    }

    /// All published blocks.
    pub fn published(&self) -> impl Iterator<Item = Place> {
        let published = |slot: &&Slot| slot.is_published();
        self.slots.iter().filter(published).filter_map(|slot| slot.place())
    }

    /// The published blocks among `count` slots from this one on.
    pub fn published_within(&self, from: u32, count: u32) -> impl Iterator<Item = Published> {
        let slots = (from..self.slots()).take(count as usize).map(|slot| (slot, &self.slots[slot as usize]));
        slots.filter(|(_, record)| record.is_published()).filter_map(|(slot, record)| {
            let (place, owner) = (record.place()?, self.owners.get(record.owner));
            Some(Published { slot: self.life(slot), place, owner, held: !record.idle })
        })
    }

    /// The changes since the last call, in their order.
    pub fn take_changes(&mut self) -> Vec<Change> {
        std::mem::take(&mut self.changes)
    }

    /// Number and XOR of the published keys.
    pub fn digest(&self) -> (u64, BlockKey) {
        (self.index.len() as u64, BlockKey(self.xor))
    }

    /// What happened so far.
    pub fn tally(&self) -> Tally {
        self.tally
    }

    /// Grants that are held, and that wait.
    pub fn grants(&self) -> (usize, usize) {
        (self.held.values().filter(|held| held.grant.is_some()).count(), self.waiting.len())
    }

    /// Slots by state.
    pub fn occupancy(&self) -> Occupancy {
        let mut sum = Occupancy::default();
        for record in &self.slots {
            match record.state {
                State::Free => sum.free += 1,
                State::Reserved => sum.reserved += 1,
                State::Quarantine => sum.quarantine += 1,
                State::Absent => {}
                State::Committed { .. } if record.idle => sum.cached += 1,
                State::Committed { .. } => sum.pinned += 1,
            }
        }
        sum
    }

    /// True if nobody holds or awaits anything: all slots are free or cached.
    pub fn idle(&self) -> bool {
        let Occupancy { free, cached, .. } = self.occupancy();
        self.held.is_empty()
            && self.waiting.is_empty()
            && self.granted.is_empty()
            && self.writers.is_empty()
            && free + cached == self.size()
    }

    fn grant_slots(&self, holder: Holder) -> impl Iterator<Item = u32> {
        self.held.get(&holder).and_then(|held| held.grant.as_ref()).into_iter().flatten().copied()
    }

    fn granted_index(&self, holder: Holder, index: u32) -> Option<u32> {
        self.held.get(&holder)?.grant.as_ref()?.get(index as usize).copied()
    }

    fn granted_slot(&self, slot: u32) -> GrantedSlot {
        let record = &self.slots[slot as usize];
        GrantedSlot { slot: self.life(slot), committed: matches!(record.state, State::Committed { .. }) }
    }

    fn life(&self, slot: u32) -> SlotRef {
        SlotRef { slot, generation: self.slots[slot as usize].generation }
    }

    fn is(&self, slot: u32, state: State) -> bool {
        self.slots[slot as usize].state == state
    }
}

/// Of so many slots of a pool one may be taken for the node itself while somebody waits for room...
const OWN_SHARE: u32 = 16;
/// ... but no more than these: a peer that reads from the SSD behind keeps so many reads under way.
const OWN_LIMIT: u32 = 32;

/// One in so many slots of the demand is forgotten with each smaller grant: large ones are remembered for some dozens.
const DEMAND_SHARE: usize = 8;
