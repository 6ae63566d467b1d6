//! A scrub of the tier: blocks are read for no other end than to find those that have rotted while nobody wanted them.
//!
//! One block at a time, so that whoever wants another waits for one read at most. A step is what one question of whoever runs
//! the daemon covers; the pauses between steps are the shell's (`daemon/asked.rs`).

use std::collections::BTreeMap;

use crate::admin::{Cursor, Verified};
use crate::pool::tier::{Fate, OpId, Record};
use crate::types::{Medium, Nanos};

use super::{Engine, Output};

/// A step ends behind so many blocks or bytes: 4 MiB are some 4 ms of a disk of 1 GB/s.
const STEP_BLOCKS: usize = 64;
const STEP_BYTES: u64 = 4 << 20;
/// Places that are looked at together, and in one step: some of them may be empty.
const PLACES: u32 = 16;
const STEP_PLACES: u32 = 4096;

/// A step under way.
#[derive(Debug, Default)]
struct Step {
    /// The next one last.
    left: Vec<Record>,
    reading: Option<(OpId, Record)>,
    found: Verified,
}

/// All steps under way, by their numbers. Few: the shell lets one through at a time, and asks no further who is gone.
#[derive(Debug, Default)]
pub(super) struct Scrubs(BTreeMap<u64, Step>);

impl Engine {
    /// Where on the tier a verification of this medium (or all) goes on, if it does there.
    pub fn verifies_tier(&self, from: Cursor, medium: Option<Medium>) -> Option<Cursor> {
        let tier = self.tier_stretch().filter(|_| medium != Some(Medium::Dram))?;
        self.on_tier(from).or_else(|| (medium == Some(Medium::Ssd)).then_some(tier))
    }

    /// Begins to verify the blocks of the next step on the tier. `Output::Scrubbed` with this number follows; and where the
    /// step behind it begins.
    pub fn scrub(&mut self, from: Cursor, now: Nanos, out: &mut Vec<Output>) -> (u64, Option<Cursor>) {
        let (mut step, mut bytes, mut next) = (Step::default(), 0, Some(from.slot));
        while let Some(at) = next
            && step.left.len() < STEP_BLOCKS
            && bytes < STEP_BYTES
            && at - from.slot < STEP_PLACES
        {
            let (records, behind) = self.tier_page(at, PLACES);
            bytes += records.iter().map(|record| record.layout.block_bytes() as u64).sum::<u64>();
            step.left.extend(records);
            next = behind;
        }
        step.left.reverse();
        let number = self.number();
        self.change(now, out, |engine| {
            engine.scrubs.0.insert(number, step);
            engine.scrub_on(number);
        });
        (number, next.map(|slot| Cursor { slot, ..from }))
    }

    /// Reads the next block of a step, or ends it.
    fn scrub_on(&mut self, number: u64) {
        while let Some(step) = self.scrubs.0.get_mut(&number) {
            let Some(record) = step.left.pop() else {
                let found = std::mem::take(&mut step.found);
                self.scrubs.0.remove(&number);
                return self.out.push(Output::Scrubbed { number, found });
            };
            if let Some(op) = self.verify_on_tier(&record) {
                if let Some(step) = self.scrubs.0.get_mut(&number) {
                    step.reading = Some((op, record));
                }
                return;
            }
        }
    }

    /// A read of the tier is over, perhaps one of these.
    pub(super) fn scrub_ended(&mut self, op: OpId, fate: Fate) {
        let reads = |step: &Step| step.reading.is_some_and(|(reading, _)| reading == op);
        let Some((&number, step)) = self.scrubs.0.iter_mut().find(|(_, step)| reads(step)) else { return };
        let Some((_, record)) = step.reading.take() else { return };
        let found = &mut step.found;
        if matches!(fate, Fate::Done | Fate::Corrupt) {
            found.blocks += 1;
            found.bytes += record.layout.block_bytes() as u64;
        }
        match fate {
            Fate::Done => {}
            Fate::Corrupt => found.bad.push(record.place.key),
            Fate::Missing => found.gone += 1,
            _ => found.failed += 1,
        }
        self.scrub_on(number);
    }
}
