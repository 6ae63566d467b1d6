//! The medium behind the arena: blocks are written to it while they lie in DRAM, and are read back when they are wanted.
//!
//! ```text
//!   arena    published --- found once more, or about to be evicted ---> write: stays readable meanwhile
//!            <--- read into a slot, verified, committed ---- wanted by a client or a peer, or prefetched (`fetch.rs`)
//!   stop     all that is in the arena only, what was used last first, within the shell's patience
//! ```
//!
//! A write takes a hold on the bytes and no reference in the pool: the block may be evicted under it, and then its slot is
//! in quarantine until the write is over. So a slow disk never keeps anybody waiting for room.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::messages::{DaemonReport, Refusal};
use crate::pool::tier::{Capacity, Fate, Health, OpId, Record, Tier, TierEvent, Whose};
use crate::types::{BlockKey, Layout, Medium, Nanos, Owner, SlotRef};

use super::fetch::{Aim, Via};
use super::objects::is_object;
use super::{Engine, Output, SECOND};

mod flush;

use flush::Flushing;

/// Writes under way: beyond, they wait for the next look. The tier bounds their bytes itself.
const WRITES: usize = 256;
/// Part of a store's slots that are to be empty or on the tier before they are needed, unless grants take more at once...
const CLEAN_SHARE: usize = 16;
/// The same of objects, which are not dropped to make room...
const OBJECTS_SHARE: usize = 4;
/// ... but no more than half of them, and this: 256 blocks of 2 MiB are what a disk of 1 GB/s writes in half a second.
const CLEAN_LIMIT: usize = 256;

/// The store of a read that is for no slot.
const NOWHERE: usize = usize::MAX;

/// A write under way.
#[derive(Debug)]
struct Write {
    at: usize,
    slot: SlotRef,
    record: Record,
    /// Somebody had it removed meanwhile: it is not there when the write ends. The key may be written anew.
    removed: bool,
}

/// A read under way.
#[derive(Debug)]
struct Read {
    aim: Aim,
    /// Whose the block is.
    owner: Owner,
    /// The block was reported as gone meanwhile.
    gone: bool,
    /// Somebody had it removed meanwhile: it is not to come back.
    removed: bool,
}

/// A tier, and what is under way with it.
pub(super) struct Behind {
    tier: Box<dyn Tier>,
    /// Number and XOR of the keys that were reported.
    count: u64,
    xor: [u8; 16],
    writes: BTreeMap<OpId, Write>,
    writing: BTreeSet<BlockKey>,
    reads: BTreeMap<OpId, Read>,
    /// No write before: one has failed.
    pause: Nanos,
    /// It has refused a write, and has not ended one since.
    busy: bool,
    /// At the end: what is still to be written, the most wanted last.
    leaving: Option<Vec<(usize, SlotRef)>>,
    /// Who waits until something is durable.
    flushing: Flushing,
}

impl Behind {
    pub fn new(tier: Box<dyn Tier>) -> Self {
        let mut behind = Self {
            tier,
            count: 0,
            xor: [0; 16],
            writes: BTreeMap::new(),
            writing: BTreeSet::new(),
            reads: BTreeMap::new(),
            pause: 0,
            busy: false,
            leaving: None,
            flushing: Flushing::default(),
        };
        // What it has let go of while it was opened nobody knows of.
        behind.tier.poll();
        // Not kept in between: there may be ten million.
        let (mut count, mut xor) = (0, [0; 16]);
        let told = behind.tier.records().filter(|record| !is_object(record));
        told.for_each(|record| mark(&mut count, &mut xor, &record.place.key, true));
        (behind.count, behind.xor) = (count, xor);
        behind
    }

    /// How many blocks are on the tier, as reported.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Reads of blocks of this owner may end well: they are not to come back. They are still on the tier.
    pub fn doom_reads(&mut self, whose: Whose) {
        self.reads.values_mut().filter(|read| whose.has(read.owner)).for_each(|read| read.removed = true);
    }

    /// Reads of these blocks may end well: nobody is to find them all the same.
    pub fn removed(&mut self, which: impl Fn(&BlockKey) -> bool) {
        for read in self.reads.values_mut().filter(|read| which(&read.aim.1)) {
            (read.gone, read.removed) = (true, true);
        }
    }

    /// Writes of these blocks may end well: they are not there all the same. Returns those that are being written.
    fn doom(&mut self, keys: &[BlockKey]) -> Vec<BlockKey> {
        let doomed: Vec<BlockKey> = keys.iter().copied().filter(|key| self.writing.remove(key)).collect();
        for key in &doomed {
            let writes = self.writes.values_mut().filter(|write| write.record.place.key == *key);
            writes.for_each(|write| write.removed = true);
        }
        doomed
    }

    fn mark(&mut self, key: &BlockKey, there: bool) {
        mark(&mut self.count, &mut self.xor, key, there);
    }
}

fn mark(count: &mut u64, xor: &mut [u8; 16], key: &BlockKey, there: bool) {
    let mut key = key.0;
    // So that a block on both media does not cancel itself out, see `DaemonReport::Heartbeat`.
    key.rotate_left(1);
    xor.iter_mut().zip(key).for_each(|(sum, byte)| *sum ^= byte);
    *count = if there { *count + 1 } else { count.saturating_sub(1) };
}

impl Engine {
    /// Number and XOR of the keys on the tier, as reported.
    pub(super) fn tier_digest(&self) -> (u64, [u8; 16]) {
        self.behind.as_ref().map_or((0, [0; 16]), |behind| (behind.count, behind.xor))
    }

    /// Numbers of the tier, if there is one.
    pub(super) fn tier_capacity(&self) -> Option<Capacity> {
        self.behind.as_ref().map(|behind| behind.tier.capacity())
    }

    /// See [`Tier::io`].
    pub(super) fn tier_io(&self) -> &'static str {
        self.behind.as_ref().map_or("", |behind| behind.tier.io())
    }

    /// What is known of a block on the tier, if it has this layout.
    pub(super) fn tier_record(&self, key: &BlockKey, layout: Layout) -> Option<Record> {
        self.behind.as_ref()?.tier.find(key).filter(|record| record.layout == layout)
    }

    /// How many of these keys, from the first on, can be had without a peer. None if all of them are in the arena: then
    /// there was no room to pin them, and there will be none to read others.
    pub(super) fn leading_behind(&self, at: usize, keys: &[BlockKey]) -> u32 {
        let (Some(store), Some(_)) = (self.stores.get(at), &self.behind) else { return 0 };
        let layout = store.layout();
        let (mut count, mut on_tier) = (0, false);
        for key in keys {
            if store.pool.find(key).is_none() {
                if self.tier_record(key, layout).is_none() {
                    break;
                }
                on_tier = true;
            }
            count += 1;
        }
        if on_tier { count } else { 0 }
    }

    /// What is known of a block on the tier, whatever its layout.
    pub(super) fn behind_record(&self, key: &BlockKey) -> Option<Record> {
        self.behind.as_ref()?.tier.find(key)
    }

    /// How many blocks of the tier each owner has, by layout.
    pub(super) fn tier_usage(&self) -> Vec<(Owner, Layout, u64)> {
        self.behind.as_ref().map_or_else(Vec::new, |behind| behind.tier.usage())
    }

    /// The layout of a block on the tier.
    pub(super) fn tier_layout(&self, key: &BlockKey) -> Option<Layout> {
        Some(self.behind.as_ref()?.tier.find(key)?.layout)
    }

    /// All blocks on the tier.
    pub(super) fn tier_records(&self) -> impl Iterator<Item = Record> + '_ {
        self.behind.iter().flat_map(|behind| behind.tier.records())
    }

    /// Some of them, see [`Tier::page`].
    pub(super) fn tier_page(&self, from: u32, count: u32) -> (Vec<Record>, Option<u32>) {
        self.behind.as_ref().map_or((Vec::new(), None), |behind| behind.tier.page(from, count))
    }

    /// How the part of the tier does that this block is on.
    pub(super) fn tier_health_of(&self, key: &BlockKey) -> Option<Health> {
        self.behind.as_ref().map(|behind| behind.tier.health_of(key))
    }

    /// True if a block is on its way to the tier.
    pub(super) fn is_being_written(&self, key: &BlockKey) -> bool {
        self.behind.as_ref().is_some_and(|behind| behind.writing.contains(key))
    }

    /// True if it can be hoped that what is to be written will be.
    pub(super) fn takes_writes(&self) -> bool {
        let good = self.tier_capacity().is_some_and(|capacity| capacity.health == Health::Good);
        good && self.behind.as_ref().is_some_and(|behind| self.now >= behind.pause && behind.leaving.is_none())
    }

    /// True if any is.
    pub(super) fn writes_tier(&self) -> bool {
        self.behind.as_ref().is_some_and(|behind| !behind.writes.is_empty())
    }

    /// True if this read is under way, for this block.
    pub(super) fn reads_tier(&self, op: OpId, aim: Aim) -> bool {
        self.behind.as_ref().and_then(|behind| behind.reads.get(&op)).is_some_and(|read| read.aim == aim)
    }

    /// Begins to read a block into an open slot. `None`: the tier does not have it or does not answer, or somebody still
    /// writes the slot.
    pub(super) fn read_tier(&mut self, aim: Aim, slot: SlotRef) -> Option<OpId> {
        let store = self.stores.get(aim.0)?;
        let layout = store.layout();
        let owner = self.tier_record(&aim.1, layout)?.owner;
        // What comes into a slot behind the walk of a clearing would outlive it.
        if self.is_being_cleared(owner) || self.behind.as_ref()?.tier.health_of(&aim.1) == Health::Failed {
            return None;
        }
        let into = store.arena.begin_write(slot, 0..layout.strips).ok()?;
        let op = self.number();
        let behind = self.behind.as_mut()?;
        behind.reads.insert(op, Read { aim, owner, gone: false, removed: false });
        behind.tier.read(op, &aim.1, into);
        Some(op)
    }

    /// Begins to read a block for no other end than to see whether it has rotted. `None`: there is nothing that could.
    pub(super) fn verify_on_tier(&mut self, record: &Record) -> Option<OpId> {
        let op = self.number();
        let (behind, key) = (self.behind.as_mut()?, record.place.key);
        // A read as any other, for no store: whoever drops the block meanwhile is heeded.
        let read = Read { aim: (NOWHERE, key), owner: record.owner, gone: false, removed: false };
        behind.tier.verify(op, &key).then(|| {
            behind.reads.insert(op, read);
            op
        })
    }

    /// Takes what the tier has to tell.
    pub(super) fn look_at_tier(&mut self) {
        let events = self.behind.as_mut().map(|behind| behind.tier.poll()).unwrap_or_default();
        for event in events {
            let Some(behind) = &mut self.behind else { return };
            match event {
                TierEvent::Dropped(key) => {
                    behind.reads.values_mut().filter(|read| read.aim.1 == key).for_each(|read| read.gone = true);
                    self.gone_from_tier(&key);
                }
                TierEvent::Ended { op, fate } => {
                    if let Some(write) = behind.writes.remove(&op) {
                        if !write.removed {
                            behind.writing.remove(&write.record.place.key);
                        }
                        self.written(&write, fate);
                        self.write_ended(fate);
                    } else if let Some(read) = behind.reads.remove(&op) {
                        self.read_ended(op, &read, fate);
                        self.scrub_ended(op, fate);
                    } else {
                        self.flush_ended(op, fate);
                    }
                }
            }
        }
        self.objects_heard();
        self.leave_reads();
    }

    /// Nobody waits for a medium that has failed: it may never answer. What it still reads goes nowhere.
    fn leave_reads(&mut self) {
        let Some(behind) = self.behind.as_ref().filter(|behind| !behind.reads.is_empty()) else { return };
        if behind.tier.capacity().health != Health::Failed {
            return;
        }
        let fails = |read: &Read| read.gone || behind.tier.health_of(&read.aim.1) == Health::Failed;
        let left = behind.reads.iter().filter(|(_, read)| fails(read)).map(|(op, read)| (*op, read.aim));
        for (op, aim) in left.collect::<Vec<_>>() {
            self.leave_read(aim, op);
            self.scrub_ended(op, Fate::Failed);
        }
    }

    fn written(&mut self, write: &Write, fate: Fate) {
        // Whoever let go of it meanwhile was not the last to read it.
        if let Some(store) = self.stores.get_mut(write.at) {
            store.pool.noticed(write.slot, false);
        }
        let Some(behind) = &mut self.behind else { return };
        behind.busy &= fate != Fate::Done;
        if write.removed {
            return;
        }
        let key = write.record.place.key;
        let is_object = is_object(&write.record);
        match fate {
            Fate::Done => {
                self.stats.demotions.add(1, write.record.layout.block_bytes() as u64);
                self.stores.iter_mut().for_each(|store| store.pool.set_clean(&key, true));
                if is_object {
                    return self.object_written(&write.record);
                }
                self.report_tier(&key, Some(&write.record));
            }
            Fate::Busy => {
                behind.busy = true;
                if let Some(leaving) = &mut behind.leaving {
                    leaving.push((write.at, write.slot));
                }
                behind.flushing.write_again(write.at, write.slot);
            }
            // It is tried again, but not at once.
            Fate::Full | Fate::Failed => {
                self.stats.tier_refused += 1;
                behind.pause = self.now + SECOND;
                behind.flushing.write_failed();
            }
            Fate::Missing | Fate::Corrupt => {}
        }
        if is_object && fate != Fate::Done {
            self.object_not_written(&key, fate);
        }
    }

    fn read_ended(&mut self, op: OpId, read: &Read, fate: Fate) {
        let (aim, key) = (read.aim, read.aim.1);
        if fate == Fate::Corrupt {
            self.stats.corrupt_tier += 1;
            if !read.gone {
                let Some(behind) = &mut self.behind else { return };
                behind.reads.values_mut().filter(|other| other.aim.1 == key).for_each(|other| other.gone = true);
                self.gone_from_tier(&key);
            }
        }
        let Some(flight) = self.flights.get(&aim) else { return };
        if flight.via != Via::Tier(op) {
            return;
        }
        if fate == Fate::Done
            && !read.removed
            && let Some(bytes) = self.land(aim, read.owner)
        {
            self.stats.promotions.add(1, bytes);
            if let Some(store) = self.stores.get_mut(aim.0) {
                store.pool.set_clean(&key, true);
            }
            return self.flight_done(aim, false, Medium::Ssd);
        }
        let refusal = if fate == Fate::Corrupt { Refusal::Corrupt } else { Refusal::Missing };
        self.source_failed(aim, refusal);
    }

    /// The tier has let go of a block.
    fn gone_from_tier(&mut self, key: &BlockKey) {
        if !self.object_left_tier(key) {
            self.report_tier(key, None);
        }
        self.stores.iter_mut().for_each(|store| store.pool.set_clean(key, false));
    }

    /// Drops a block from the tier. True if it was there.
    pub(super) fn remove_from_tier(&mut self, key: &BlockKey) -> bool {
        self.remove_all_from_tier(std::slice::from_ref(key)) > 0
    }

    /// Drops these blocks from the tier; returns how many were there.
    pub(super) fn remove_all_from_tier(&mut self, keys: &[BlockKey]) -> u64 {
        let Some(behind) = &mut self.behind else { return 0 };
        let mut known = BTreeSet::new();
        for key in keys {
            // What is still on its way there was not reported.
            known.extend(behind.tier.find(key).filter(|_| !behind.writing.contains(key)).map(|_| *key));
            behind.tier.remove(key);
        }
        let doomed = behind.doom(keys);
        let count = self.all_gone_from_tier(&known);
        self.objects_doomed(&doomed);
        count
    }

    /// Drops blocks of objects from the tier that nobody knows.
    pub(super) fn discard_from_tier(&mut self, keys: &[BlockKey]) {
        if let Some(behind) = &mut self.behind {
            for key in keys {
                behind.tier.remove(key);
            }
            self.objects_removed(keys);
        }
    }

    /// Drops all blocks of an owner from the tier; returns how many.
    pub(super) fn clear_tier(&mut self, whose: Whose) -> u64 {
        let Some(behind) = &mut self.behind else { return 0 };
        // What is still on its way there was not reported.
        let keys = behind.tier.clear(whose);
        let doomed = behind.doom(&keys);
        // What was still on its way there was not reported.
        let mut known: BTreeSet<BlockKey> = keys.into_iter().collect();
        for key in &doomed {
            known.remove(key);
        }
        let count = self.all_gone_from_tier(&known);
        self.objects_doomed(&doomed);
        count
    }

    fn all_gone_from_tier(&mut self, keys: &BTreeSet<BlockKey>) -> u64 {
        let Some(behind) = &mut self.behind else { return 0 };
        behind.removed(|of| keys.contains(of));
        keys.iter().for_each(|key| self.gone_from_tier(key));
        keys.len() as u64
    }

    /// Reports that a block is on the tier now, or is not any more.
    fn report_tier(&mut self, key: &BlockKey, record: Option<&Record>) {
        let Some(behind) = &mut self.behind else { return };
        behind.mark(key, record.is_some());
        let (key, medium, sequence) = (*key, Medium::Ssd, self.next_sequence);
        self.next_sequence += 1;
        self.out.push(Output::Report(match record {
            Some(Record { place, .. }) => {
                let (parent, position) = (place.parent, place.position);
                DaemonReport::Stored { sequence, key, parent, position, medium }
            }
            None => DaemonReport::Removed { sequence, key, medium },
        }));
    }

    // -- writing -----------------------------------------------------------------------------------------------------

    /// Writes what was found once more since the last call: what is used twice is used again.
    pub(super) fn write_hits(&mut self) {
        if self.behind.is_none() {
            return;
        }
        for at in 0..self.stores.iter().count() {
            let hits = self.stores.get_mut(at).map(|store| store.pool.take_hits()).unwrap_or_default();
            for slot in hits {
                self.write_tier(at, slot);
            }
        }
    }

    /// Writes what will be evicted next, so that some of it can go at once when room is needed.
    pub(super) fn clean_ahead(&mut self) {
        if self.behind.as_ref().is_none_or(|behind| behind.leaving.is_some()) {
            return;
        }
        for at in 0..self.stores.iter().count() {
            let (unused, Some(store)) = (self.stores.unused(at), self.stores.get(at)) else { return };
            let size = store.pool.size() as usize;
            // Who puts an object waits for room that is not made by dropping others.
            let share = if store.objects { OBJECTS_SHARE } else { CLEAN_SHARE };
            let share = store.pool.demand().max(size / share).clamp(1, CLEAN_LIMIT).min(size / 2);
            let ahead = share.saturating_sub(store.pool.empty().saturating_add(unused));
            for slot in store.pool.dirty_victims(ahead) {
                if !self.write_tier(at, slot) {
                    return;
                }
            }
        }
    }

    /// Begins to write a block. False: not now.
    pub(super) fn write_tier(&mut self, at: usize, slot: SlotRef) -> bool {
        let Some(behind) = &self.behind else { return false };
        if behind.writes.len() >= WRITES || behind.busy || (self.now < behind.pause && behind.leaving.is_none()) {
            return false;
        }
        let Some(store) = self.stores.get(at) else { return false };
        let Some((place, owner)) = store.pool.describe(slot) else { return true };
        let (key, layout) = (place.key, store.layout());
        if behind.writing.contains(&key) {
            return true;
        }
        if behind.tier.find(&key).is_some() {
            self.stores.iter_mut().for_each(|store| store.pool.set_clean(&key, true));
            return true;
        }
        if self.is_over_quota(owner, layout) {
            self.stats.tier_over_quota += 1;
            // Who waits for it to be durable is told that it is not.
            self.behind.iter_mut().for_each(|behind| behind.flushing.write_failed());
            return true;
        }
        let Some(block) = store.arena.begin_read(slot) else { return true };
        let op = self.number();
        let Some(behind) = &mut self.behind else { return false };
        let record = Record { place, owner, layout };
        behind.writes.insert(op, Write { at, slot, record, removed: false });
        behind.writing.insert(key);
        behind.tier.write(op, record, block);
        true
    }

    /// True if one block more on the tier would be more than its owner may have there.
    pub(super) fn is_over_quota(&self, owner: Owner, layout: Layout) -> bool {
        let Some((limit, shares)) = self.stores.accounts().ssd_limit(owner) else { return false };
        let Some(behind) = &self.behind else { return false };
        let bytes = |layout: Layout| layout.block_bytes() as u64;
        let there = behind.tier.usage().into_iter().filter(|(owner, ..)| shares(*owner));
        let there: u64 = there.map(|(_, layout, blocks)| blocks * bytes(layout)).sum();
        let coming = behind.writes.values().map(|write| write.record).filter(|record| shares(record.owner));
        there + coming.map(|record| bytes(record.layout)).sum::<u64>() + bytes(layout) > limit
    }

    /// What is in the arena only, the most wanted last.
    fn dirty(&self) -> Vec<(usize, SlotRef)> {
        let stores = self.stores.iter().enumerate();
        let mut dirty: Vec<(u32, usize, SlotRef)> = stores
            .flat_map(|(at, store)| store.pool.dirty().into_iter().map(move |(used, slot)| (used, at, slot)))
            .collect();
        dirty.sort_unstable();
        dirty.into_iter().map(|(_, at, slot)| (at, slot)).collect()
    }

    // -- the end -----------------------------------------------------------------------------------------------------

    /// Begins to write all that is in the arena only.
    pub(super) fn begin_leaving(&mut self) {
        if self.behind.as_ref().is_none_or(|behind| behind.leaving.is_some()) {
            return;
        }
        self.end_flushes();
        let mut dirty = self.dirty();
        let Some(behind) = &mut self.behind else { return };
        // What is written last would push out what was written first, if there is not room for all.
        let mut room = behind.tier.capacity().limit;
        let fits = |(at, _): &&(usize, SlotRef)| {
            let bytes = self.stores.get(*at).map_or(0, |store| store.layout().block_bytes() as u64);
            room = room.saturating_sub(bytes);
            room > 0
        };
        let fit = dirty.iter().rev().take_while(fits).count().max(1).min(dirty.len());
        dirty.drain(..dirty.len() - fit);
        behind.leaving = Some(dirty);
        behind.busy = false;
        self.leave_on();
    }

    /// Writes on at the end.
    pub(super) fn leave_on(&mut self) {
        loop {
            let Some(behind) = &mut self.behind else { return };
            behind.busy &= !behind.writes.is_empty();
            if behind.writes.len() >= WRITES || behind.busy {
                return;
            }
            let Some((at, slot)) = behind.leaving.as_mut().and_then(Vec::pop) else { return };
            self.write_tier(at, slot);
        }
    }

    /// True if nobody waits until something is durable.
    pub(super) fn nobody_flushes(&self) -> bool {
        self.behind.as_ref().is_none_or(|behind| behind.flushing.is_idle())
    }

    /// True if nothing is left to be written at the end.
    pub fn has_left(&self) -> bool {
        self.behind.as_ref().is_none_or(|behind| {
            behind.leaving.as_ref().is_none_or(|leaving| leaving.is_empty()) && behind.writes.is_empty()
        })
    }

    /// Closes the tier. Nothing is done with it any more.
    pub fn close(&mut self, within: Duration) {
        if let Some(behind) = &mut self.behind {
            behind.tier.close(within);
        }
    }

    /// Asserts the laws of this file.
    pub(super) fn check_tier(&self) {
        let Some(behind) = &self.behind else { return };
        let writes = behind.writes.values().filter(|write| !write.removed);
        let keys: Vec<BlockKey> = writes.map(|write| write.record.place.key).collect();
        let writing: BTreeSet<BlockKey> = keys.iter().copied().collect();
        assert!(writing == behind.writing && writing.len() == keys.len(), "writes and their keys differ");
        assert!(behind.writes.len() <= WRITES, "too many writes");
    }
}
