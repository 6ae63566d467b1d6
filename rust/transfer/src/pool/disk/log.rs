//! The log of one device: what is written goes behind what was written before, into segments that are reused in turn.
//!
//! ```text
//!   vacant --prepare--> spare ----> head --full--> sealing --footer--> sealed ---oldest, room is needed---> reclaimed
//!     ^   (header written)        (batches)    (its batches end)                 (warm blocks move on)          |
//!     +---------------------------------------------------------------------------------------------------------+
//! ```
//!
//! It is a state machine: operations queue items, [`Log::poll`] takes in what the workers have finished, and `pump` begins
//! whatever can begin. Segments are let go of strictly in the order in which they were written: so a removal, which lies
//! behind what it removes, is never gone before it. Two items of one key are never under way at once, so they lie in order.

mod batches;
mod flush;
mod queue;

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use rustc_hash::{FxHashMap, FxHashSet};

use crate::memory::{ReadHold, WriteHold};
use crate::random::Random;
use crate::types::{BlockKey, Layout, Owner};

use super::super::tier::{Capacity, Fate, Health, OpId, Record, TierEvent, Whose};
use super::format::{Entry, Life, PAGE, Says, footer_pages, header_pages};
use super::index::{Index, Location};
use super::io::{FileId, JobId, Outcome, Work, Workers};
use super::reclaim::Reclaim;
use super::trouble::Trouble;
use batches::Sent;
pub(super) use flush::Asker;
use flush::{Flush, Syncing};
use queue::{Item, What};

/// Bytes that may wait to be written: what a slow device (500 MB/s) writes in an eighth of a second. On a small device less:
/// a segment's.
const QUEUE_BYTES: u64 = 64 << 20;
/// Writes of one key that may wait for each other.
const JOINED: usize = 64;
/// Segment files: 64 make up the limit, and each stop may leave a small one.
pub const FILES: usize = 1024;

/// What a job is for. `at` is where the block lies now: it may move while it is read.
pub(super) enum Doing {
    Batch {
        file: FileId,
        sent: Vec<Sent>,
    },
    /// `warms`: somebody wants it.
    Load {
        op: OpId,
        key: BlockKey,
        file: FileId,
        at: Location,
        warms: bool,
    },
    Fetch {
        reclaim: u64,
        record: Record,
        digest: u32,
        from: Location,
    },
    Prepare {
        file: FileId,
    },
    Finish {
        file: FileId,
        bytes: u64,
    },
    Sync {
        file: FileId,
    },
    Remove {
        file: FileId,
    },
    Probe,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    Vacant,
    Preparing,
    Spare,
    Head,
    Sealing { begun: bool },
    Sealed,
}

/// One segment file.
#[derive(Debug)]
pub(super) struct Segment {
    pub life: Life,
    pub bytes: u64,
    pub stage: Stage,
    /// Page at which the next batch begins.
    pub cursor: u32,
    /// What it says so far; emptied when it is in the footer.
    pub table: Vec<Entry>,
    /// Entries, those of batches under way included.
    pub entries: usize,
    pub batches: u32,
    pub readers: u32,
    /// Written since it was last made durable.
    pub dirty: bool,
    /// A batch of it failed: a scan would end there, so it needs its footer.
    pub hole: bool,
}

impl Segment {
    /// A file with nothing in it.
    pub(super) fn vacant(life: Life, bytes: u64) -> Self {
        let (stage, table) = (Stage::Vacant, Vec::new());
        Self { life, bytes, stage, cursor: 1, table, entries: 0, batches: 0, readers: 0, dirty: false, hole: false }
    }

    fn pages(&self) -> u32 {
        (self.bytes / PAGE as u64) as u32
    }

    fn has_room(&self, entries: usize, pages: u32) -> bool {
        let all = u64::from(self.cursor) + u64::from(header_pages(entries)) + u64::from(pages);
        all + u64::from(footer_pages(self.entries + entries)) <= u64::from(self.pages())
    }
}

/// One device's blocks.
pub struct Log {
    pub(super) io: Workers,
    pub(super) limit: u64,
    pub(super) segment_bytes: u64,
    pub(super) used: u64,
    pub(super) index: Index,
    pub(super) segments: BTreeMap<FileId, Segment>,
    /// Sealing and sealed ones, the oldest first.
    pub(super) order: VecDeque<FileId>,
    /// How many of them wait for their footer to be written.
    pub(super) unsealed: usize,
    pub(super) head: Option<FileId>,
    pub(super) spare: Option<FileId>,
    pub(super) next_number: u64,
    pub(super) random: Random,
    queue: VecDeque<Item>,
    removals: usize,
    waiting: u64,
    /// Writes that nobody has removed, by their numbers.
    pending: FxHashMap<BlockKey, u64>,
    joined: FxHashMap<u64, Vec<OpId>>,
    pub(super) jobs: FxHashMap<JobId, Doing>,
    batches: usize,
    /// Keys in batches under way.
    under_way: FxHashSet<BlockKey>,
    /// What goes for all keys is under way.
    barrier: bool,
    next_sequence: u64,
    pub(super) next_job: JobId,
    unfinished: usize,
    pub(super) reading: FxHashMap<BlockKey, u32>,
    flushes: VecDeque<Flush>,
    syncing: Option<Syncing>,
    pub(super) reclaim: Option<Reclaim>,
    pub(super) reclaims: u64,
    /// Blocks that the index knows no more, and that a restart would still find in these files.
    pub(super) ghosts: BTreeMap<FileId, FxHashSet<BlockKey>>,
    pub(super) events: Vec<TierEvent>,
    pub(super) trouble: Trouble,
    pub(super) closing: bool,
    /// Files of somebody else's.
    pub(super) foreign: FxHashSet<FileId>,
}

impl Log {
    /// A log with nothing in it. `seed` makes nonces.
    pub(super) fn empty(io: Workers, limit: u64, segment_bytes: u64, seed: u64) -> Self {
        Self {
            io,
            limit,
            segment_bytes,
            used: super::OVERHEAD,
            index: Index::default(),
            segments: BTreeMap::new(),
            order: VecDeque::new(),
            unsealed: 0,
            head: None,
            spare: None,
            next_number: 1,
            random: Random(seed),
            queue: VecDeque::new(),
            removals: 0,
            waiting: 0,
            pending: FxHashMap::default(),
            joined: FxHashMap::default(),
            jobs: FxHashMap::default(),
            batches: 0,
            under_way: FxHashSet::default(),
            barrier: false,
            next_sequence: 0,
            next_job: 0,
            unfinished: 0,
            reading: FxHashMap::default(),
            flushes: VecDeque::new(),
            syncing: None,
            reclaim: None,
            reclaims: 0,
            ghosts: BTreeMap::new(),
            events: Vec::new(),
            trouble: Trouble::default(),
            closing: false,
            foreign: FxHashSet::default(),
        }
    }

    // -- what is asked of it -----------------------------------------------------------------------------------------

    /// See [`super::super::tier::Tier::write`].
    pub fn write(&mut self, op: OpId, record: Record, block: ReadHold) {
        let (key, bytes) = (record.place.key, block.pages().len() as u64);
        if self.index.number(&key).is_some() {
            return self.end(op, Fate::Done);
        }
        if let Some(sequence) = self.pending.get(&key) {
            let joined = self.joined.entry(*sequence).or_default();
            if joined.len() == JOINED {
                return self.end(op, Fate::Busy);
            }
            return joined.push(op);
        }
        // The largest block has a segment to itself: header, batch header, footer of one entry.
        if bytes + (4 * PAGE) as u64 > self.segment_bytes {
            return self.end(op, Fate::Full);
        }
        if self.closing || self.health() != Health::Good {
            return self.end(op, Fate::Failed);
        }
        if self.waiting > 0 && self.waiting + bytes > QUEUE_BYTES.min(self.segment_bytes) {
            return self.end(op, Fate::Busy);
        }
        self.waiting += bytes;
        self.pending.insert(key, self.next_sequence);
        self.push(What::Write { op, record, block });
        self.pump();
    }

    /// See [`super::super::tier::Tier::read`].
    pub fn read(&mut self, op: OpId, key: &BlockKey, into: WriteHold) {
        let Some(found) = self.index.find(key) else { return self.end(op, Fate::Missing) };
        let layout = found.record.layout;
        if into.strips() != (0..layout.strips) || into.strip_bytes() != layout.strip_bytes as usize {
            return self.end(op, Fate::Missing);
        }
        if self.health() == Health::Failed {
            return self.end(op, Fate::Failed);
        }
        self.load(op, key, found.location, |offset| Work::Load { offset, into, digest: found.digest }, true);
    }

    /// See [`super::super::tier::Tier::verify`].
    pub fn verify(&mut self, op: OpId, key: &BlockKey) {
        let Some(found) = self.index.find(key) else { return self.end(op, Fate::Missing) };
        if self.health() == Health::Failed {
            return self.end(op, Fate::Failed);
        }
        let (layout, digest) = (found.record.layout, found.digest);
        self.load(op, key, found.location, |offset| Work::Check { offset, layout, digest }, false);
    }

    fn load(&mut self, op: OpId, key: &BlockKey, at: Location, work: impl FnOnce(u64) -> Work, warms: bool) {
        let Location { file, page } = at;
        self.segment(file).readers += 1;
        *self.reading.entry(*key).or_default() += 1;
        self.submit(file, work(u64::from(page) * PAGE as u64), Doing::Load { op, key: *key, file, at, warms });
    }

    /// See [`super::super::tier::Tier::remove`].
    pub fn remove(&mut self, key: &BlockKey) -> bool {
        let there = self.forget(key);
        if there || self.removals > 0 {
            self.pump();
        }
        there
    }

    /// Forgets a block, and says so on the disk if it is there. True if it was known.
    pub(super) fn forget(&mut self, key: &BlockKey) -> bool {
        let mut there = self.index.remove(key);
        let mut on_disk = there;
        for ghosts in self.ghosts.values_mut() {
            on_disk |= ghosts.remove(key);
        }
        if let Some(sequence) = self.pending.remove(key) {
            there = true;
            self.end_joined(sequence, Fate::Missing);
            match self.queue.iter().position(|item| item.sequence == sequence) {
                Some(at) => self.drop_item(at, Fate::Missing),
                // Its batch is under way; it ends as `Missing` with that.
                None => on_disk = true,
            }
        }
        if on_disk {
            self.say(Says::Removed(*key));
        }
        there
    }

    /// Forgets a block that stays on the disk for now. Should it be removed by somebody before its file is used again, that is
    /// said on the disk.
    pub(super) fn forget_silently(&mut self, key: &BlockKey) {
        if let Some(found) = self.index.find(key) {
            self.index.remove(key);
            self.ghosts.entry(found.location.file).or_default().insert(*key);
        }
    }

    /// See [`super::super::tier::Tier::clear`].
    pub fn clear(&mut self, whose: Whose) -> Vec<BlockKey> {
        let theirs = |record: &Record| whose.has(record.owner);
        let stored = self.index.iter().map(|found| found.record).filter(theirs).map(|record| record.place.key);
        let mut keys: Vec<BlockKey> = stored.collect();
        let waiting = self.queue.iter().filter_map(|item| match &item.what {
            What::Write { record, .. } if theirs(record) => Some(record.place.key),
            _ => None,
        });
        let sent = self.jobs.values().filter_map(|doing| match doing {
            Doing::Batch { sent, .. } => Some(sent),
            _ => None,
        });
        let sent = sent.flatten().filter_map(|sent| match sent.entry.says {
            Says::Block(record, _) if theirs(&record) => Some(record.place.key),
            _ => None,
        });
        let pending: Vec<BlockKey> = waiting.chain(sent).filter(|key| self.pending.contains_key(key)).collect();
        for key in &pending {
            if let Some(sequence) = self.pending.remove(key) {
                self.end_joined(sequence, Fate::Missing);
                if let Some(at) = self.queue.iter().position(|item| item.sequence == sequence) {
                    self.drop_item(at, Fate::Missing);
                }
            }
        }
        keys.iter().for_each(|key| {
            self.index.remove(key);
        });
        keys.extend(pending);
        // One entry for all of them. Also if there were none: a failed batch may hold some.
        self.say(Says::Cleared(whose));
        self.pump();
        keys
    }

    /// What is known of a block that can be read.
    pub fn find(&self, key: &BlockKey) -> Option<Record> {
        self.index.find(key).map(|found| found.record)
    }

    /// True if a write of this key is under way.
    pub fn expects(&self, key: &BlockKey) -> bool {
        self.pending.contains_key(key)
    }

    /// All that can be read.
    pub fn records(&self) -> impl Iterator<Item = Record> + '_ {
        self.index.iter().map(|found| found.record)
    }

    /// How many blocks each owner has, by layout.
    pub fn usage(&self) -> impl Iterator<Item = (Owner, Layout, u64)> {
        self.index.usage()
    }

    /// Places that blocks have had: below this one.
    pub fn places(&self) -> u32 {
        self.index.places()
    }

    /// The block in a place, if it can be read.
    pub fn place(&self, place: u32) -> Option<Record> {
        self.index.place(place).map(|found| found.record)
    }

    /// See [`super::super::tier::Tier::flush`].
    pub fn flush(&mut self, op: OpId) {
        if self.health() != Health::Good {
            return self.end(op, Fate::Failed);
        }
        self.ask_flush(Asker::User(op));
        self.pump();
    }

    /// True if something waits to be written.
    pub(super) fn has_work(&self) -> bool {
        !self.queue.is_empty()
    }

    /// See [`super::super::tier::Tier::poll`].
    pub fn poll(&mut self) -> Vec<TierEvent> {
        self.look();
        std::mem::take(&mut self.events)
    }

    /// See [`super::super::tier::Tier::capacity`].
    pub fn capacity(&self) -> Capacity {
        let blocks = self.index.len() as u64;
        Capacity { limit: self.limit, used: self.used, blocks, waiting: self.waiting, health: self.health() }
    }

    /// See [`super::super::tier::Tier::close`].
    pub fn close(&mut self, within: Duration) {
        let until = Instant::now() + within;
        self.closing = true;
        self.work_until(until, |log| log.unfinished == 0);
        if let Some(head) = self.head.take() {
            self.seal(head);
        }
        self.ask_flush(Asker::Probe);
        self.pump();
        self.work_until(until, |log| log.jobs.is_empty());
        self.io.stop();
    }

    fn work_until(&mut self, until: Instant, done: impl Fn(&Self) -> bool) {
        while !done(self) && self.health() == Health::Good && self.io.wait(until) {
            self.look();
        }
    }

    // -- what goes on ------------------------------------------------------------------------------------------------

    fn look(&mut self) {
        for (job, outcome) in self.io.finished() {
            self.finished(job, outcome);
        }
        self.pump();
    }

    /// Begins all that can begin.
    pub(super) fn pump(&mut self) {
        self.notice_silence();
        self.retry();
        while self.assemble() | self.make_room() | self.finish_sealing() | self.sync() {}
    }

    pub(super) fn end(&mut self, op: OpId, fate: Fate) {
        self.tell(TierEvent::Ended { op, fate });
    }

    pub(super) fn tell(&mut self, event: TierEvent) {
        self.events.push(event);
        if self.events.len() == 1 {
            self.io.notify();
        }
    }

    fn end_joined(&mut self, sequence: u64, fate: Fate) {
        for op in self.joined.remove(&sequence).unwrap_or_default() {
            self.end(op, fate);
        }
    }

    /// Of a file that is known.
    pub(super) fn segment(&mut self, file: FileId) -> &mut Segment {
        self.segments.get_mut(&file).expect("only vacant segments that nobody reads are forgotten")
    }

    pub(super) fn submit(&mut self, file: FileId, work: Work, doing: Doing) {
        self.jobs.insert(self.next_job, doing);
        self.io.submit(self.next_job, file, work);
        self.next_job += 1;
    }

    // -- what has ended ----------------------------------------------------------------------------------------------

    fn finished(&mut self, job: JobId, outcome: Outcome) {
        let Some(doing) = self.jobs.remove(&job) else { return };
        let writes = !matches!(doing, Doing::Load { .. } | Doing::Fetch { .. } | Doing::Probe);
        let error = if let Outcome::Failed(error) = &outcome { Some(error.to_string()) } else { None };
        let done = error.is_none();
        match doing {
            Doing::Batch { file, sent } => self.batch_ended(file, sent, done),
            Doing::Load { op, key, file, at, warms } => {
                self.read_ended(&key, file);
                let fate = match outcome {
                    Outcome::Corrupt => {
                        // What was removed and written anew during the read is another copy.
                        if self.index.find(&key).is_some_and(|found| found.location == at) {
                            self.forget(&key);
                        }
                        Fate::Corrupt
                    }
                    Outcome::Failed(_) => Fate::Failed,
                    _ => {
                        if warms {
                            self.index.warm(&key);
                        }
                        Fate::Done
                    }
                };
                self.end(op, fate);
            }
            Doing::Fetch { reclaim, record, digest, from } => {
                self.read_ended(&record.place.key, from.file);
                match outcome {
                    Outcome::Fetched(pages) if self.moves(reclaim) => {
                        self.push(What::Move { reclaim, record, digest, from, pages });
                    }
                    _ => self.moved(reclaim),
                }
            }
            Doing::Prepare { file } => {
                let segment = self.segment(file);
                segment.stage = if done { Stage::Spare } else { Stage::Vacant };
                if done {
                    segment.cursor = 1;
                    self.spare = Some(file);
                    self.ghosts.remove(&file);
                }
            }
            Doing::Finish { file, bytes } => {
                let segment = self.segment(file);
                if done {
                    let before = std::mem::replace(&mut segment.bytes, bytes);
                    (segment.stage, segment.hole, segment.dirty) = (Stage::Sealed, false, false);
                    segment.table = Vec::new();
                    self.used -= before - bytes;
                } else {
                    segment.stage = Stage::Sealing { begun: false };
                    self.unsealed += 1;
                }
            }
            Doing::Sync { file } => {
                if let Some(segment) = self.segments.get_mut(&file) {
                    segment.dirty |= !done;
                }
                if let Some(syncing) = &mut self.syncing {
                    syncing.left -= 1;
                    syncing.failed |= !done;
                }
                self.synced();
            }
            Doing::Remove { file } => {
                if done && let Some(segment) = self.segments.remove(&file) {
                    self.used -= segment.bytes;
                    self.ghosts.remove(&file);
                }
            }
            Doing::Probe => {}
        }
        match error {
            Some(error) if writes => self.writing_failed(job, &error),
            Some(error) => self.reading_failed(&error),
            None if writes => self.writing_works(job),
            None => self.reading_works(),
        }
    }

    /// Reads under way of a block learn where it lies now.
    fn moved_from(&mut self, moved: &BlockKey, from: Location, to: Location) {
        if self.reading.contains_key(moved) {
            for doing in self.jobs.values_mut() {
                if let Doing::Load { key, at, .. } = doing
                    && (&*key, *at) == (moved, from)
                {
                    *at = to;
                }
            }
        }
    }

    /// Ends the reads that no thread has begun. One that has been begun ends when the device lets go of it.
    pub(super) fn drop_reads(&mut self) {
        for job in self.io.drop_loads() {
            if let Some(Doing::Load { op, key, file, .. }) = self.jobs.remove(&job) {
                self.read_ended(&key, file);
                self.end(op, Fate::Failed);
            }
        }
    }

    fn read_ended(&mut self, key: &BlockKey, file: FileId) {
        self.segment(file).readers -= 1;
        if let Some(readers) = self.reading.get_mut(key) {
            *readers -= 1;
            if *readers == 0 {
                self.reading.remove(key);
            }
        }
    }

    /// Panics if its parts contradict each other. For tests.
    pub fn check(&self) {
        self.index.check();
        assert!(self.used <= self.limit, "{} bytes of {}", self.used, self.limit);
        let sizes: u64 = self.segments.values().map(|segment| segment.bytes).sum();
        assert_eq!(sizes + super::OVERHEAD, self.used);
        let batches: u32 = self.segments.values().map(|segment| segment.batches).sum();
        assert_eq!(batches as usize, self.batches);
        let sent = self.jobs.values().map(|doing| if let Doing::Batch { sent, .. } = doing { sent.len() } else { 0 });
        assert_eq!(self.unfinished, self.queue.len() + sent.sum::<usize>());
        assert_eq!(self.removals, self.queue.iter().filter(|item| matches!(item.what, What::Say(_))).count());
        let numbers: Vec<u64> = self.order.iter().map(|file| self.segments[file].life.number).collect();
        assert!(numbers.is_sorted(), "segments in order: {numbers:?}");
        let waits = |segment: &&Segment| segment.stage == Stage::Sealing { begun: false };
        assert_eq!(self.unsealed, self.segments.values().filter(waits).count());
        for (file, segment) in &self.segments {
            let holds = matches!(segment.stage, Stage::Head | Stage::Sealing { .. } | Stage::Sealed);
            assert!(holds || self.index.is_empty_in(*file), "segment {file} is {:?}", segment.stage);
        }
    }
}
