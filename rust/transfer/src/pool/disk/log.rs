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

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use rustc_hash::{FxHashMap, FxHashSet};

use crate::memory::{ReadHold, WriteHold};
use crate::random::Random;
use crate::types::BlockKey;

use super::super::tier::{Capacity, Fate, Health, OpId, Record, TierEvent, Whose};
use super::format::{
    BATCH_ENTRIES, Entry, Life, PAGE, Says, block_pages, digest, encode_batch, encode_footer, encode_life,
    footer_pages, header_pages,
};
use super::index::{Index, Location};
use super::io::{FileId, JobId, Outcome, Pages, Part, Work, Workers};
use super::reclaim::Reclaim;
use super::trouble::Trouble;

/// Bytes that may wait to be written: what a slow device (500 MB/s) writes in an eighth of a second. On a small device less:
/// a segment's.
const QUEUE_BYTES: u64 = 64 << 20;
/// Removals that may wait: 25 MB of them. They only do while nothing can be written.
const QUEUE_REMOVALS: usize = 1 << 18;
/// Batches under way: enough to keep a disk busy, and half of the threads are left for reads.
const BATCHES: usize = 4;
/// Pages of blocks in a batch: 1 MiB, above which no disk gets faster.
const BATCH_PAGES: u32 = 256;
/// Blocks in a batch: as many as one page of header names.
const BATCH_BLOCKS: usize = 56;
/// Writes of one key that may wait for each other.
const JOINED: usize = 64;
/// Segment files: 64 make up the limit, and each stop may leave a small one.
pub const FILES: usize = 1024;

/// What waits to be written.
pub(super) struct Item {
    sequence: u64,
    what: What,
}

pub(super) enum What {
    Write {
        op: OpId,
        record: Record,
        block: ReadHold,
    },
    /// A block that is worth more than its segment.
    Move {
        reclaim: u64,
        record: Record,
        digest: u32,
        from: Location,
        pages: Pages,
    },
    Say(Says),
}

impl Item {
    fn key(&self) -> Option<BlockKey> {
        match &self.what {
            What::Write { record, .. } | What::Move { record, .. } => Some(record.place.key),
            What::Say(Says::Removed(key)) => Some(*key),
            What::Say(_) => None,
        }
    }

    fn pages(&self) -> u32 {
        match &self.what {
            What::Write { record, .. } | What::Move { record, .. } => block_pages(record.layout),
            What::Say(_) => 0,
        }
    }
}

/// What is remembered of an item whose batch is under way.
pub(super) struct Sent {
    sequence: u64,
    entry: Entry,
    from: Sender,
}

pub(super) enum Sender {
    Write(OpId),
    Move { reclaim: u64, from: Location },
    Say,
}

/// What a job is for.
pub(super) enum Doing {
    Batch { file: FileId, sent: Vec<Sent> },
    Load { op: OpId, key: BlockKey, file: FileId },
    Fetch { reclaim: u64, record: Record, digest: u32, from: Location },
    Prepare { file: FileId },
    Finish { file: FileId, bytes: u64 },
    Sync { file: FileId },
    Remove { file: FileId },
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

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Asker {
    User(OpId),
    Reclaim(u64),
    Probe,
}

struct Flush {
    asker: Asker,
    /// Items with a lower number count.
    before: u64,
    /// How many of those are not written yet.
    left: usize,
}

struct Syncing {
    askers: Vec<Asker>,
    left: usize,
    failed: bool,
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
    head: Option<FileId>,
    spare: Option<FileId>,
    pub(super) next_number: u64,
    random: Random,
    pub(super) queue: VecDeque<Item>,
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
    pub(super) events: Vec<TierEvent>,
    pub(super) trouble: Trouble,
    closing: bool,
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
        let Location { file, page } = found.location;
        self.segment(file).readers += 1;
        *self.reading.entry(*key).or_default() += 1;
        let load = Work::Load { offset: u64::from(page) * PAGE as u64, into, digest: found.digest };
        self.submit(file, load, Doing::Load { op, key: *key, file });
    }

    /// See [`super::super::tier::Tier::remove`].
    pub fn remove(&mut self, key: &BlockKey) -> bool {
        let there = self.forget(key);
        if there {
            self.pump();
        }
        there
    }

    /// Forgets a block, and says so on the disk if it is there.
    pub(super) fn forget(&mut self, key: &BlockKey) -> bool {
        let mut there = false;
        let mut on_disk = self.index.remove(key);
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
        there | on_disk
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

    /// See [`super::super::tier::Tier::flush`].
    pub fn flush(&mut self, op: OpId) {
        if self.health() != Health::Good {
            return self.end(op, Fate::Failed);
        }
        self.ask_flush(Asker::User(op));
        self.pump();
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

    fn push(&mut self, what: What) {
        let item = Item { sequence: self.next_sequence, what };
        self.next_sequence += 1;
        self.unfinished += 1;
        // What moves makes the room that the others wait for.
        if matches!(item.what, What::Move { .. }) { self.queue.push_front(item) } else { self.queue.push_back(item) }
    }

    fn say(&mut self, says: Says) {
        self.removals += 1;
        self.push(What::Say(says));
        if self.removals > QUEUE_REMOVALS {
            self.forget_all();
        }
    }

    /// More was removed than can be remembered while nothing can be written: all of it goes, as one entry. What is not
    /// under way yet is written behind that.
    fn forget_all(&mut self) {
        tracing::warn!("{}: too many removals wait to be written: all blocks are dropped", self.io.medium().name());
        let keys: Vec<BlockKey> = self.index.iter().map(|found| found.record.place.key).collect();
        for key in keys {
            self.index.remove(&key);
            self.tell(TierEvent::Dropped(key));
        }
        self.drop_items(Fate::Missing, |what| matches!(what, What::Say(_)));
        let queued: FxHashSet<u64> = self.queue.iter().map(|item| item.sequence).collect();
        let sent: Vec<(BlockKey, u64)> = self.pending.iter().map(|(key, sequence)| (*key, *sequence)).collect();
        for (key, sequence) in sent.into_iter().filter(|(_, sequence)| !queued.contains(sequence)) {
            self.pending.remove(&key);
            self.end_joined(sequence, Fate::Missing);
        }
        let item = Item { sequence: self.next_sequence, what: What::Say(Says::ClearedAll) };
        (self.next_sequence, self.unfinished, self.removals) = (self.next_sequence + 1, self.unfinished + 1, 1);
        self.queue.push_front(item);
    }

    /// Takes an item out of the queue.
    fn drop_item(&mut self, at: usize, fate: Fate) {
        let Some(item) = self.queue.remove(at) else { return };
        match item.what {
            What::Write { op, record, block } => {
                self.waiting -= block.pages().len() as u64;
                drop(block);
                if self.pending.get(&record.place.key) == Some(&item.sequence) {
                    self.pending.remove(&record.place.key);
                    self.end_joined(item.sequence, fate);
                }
                self.end(op, fate);
            }
            What::Move { reclaim, .. } => self.moved(reclaim),
            What::Say(_) => self.removals -= 1,
        }
        self.written(item.sequence);
    }

    /// Ends what waits to be written, except for removals.
    pub(super) fn drop_writes(&mut self, fate: Fate) {
        self.drop_items(fate, |what| !matches!(what, What::Say(_)));
    }

    /// What waits to be moved is not.
    pub(super) fn drop_moves(&mut self) {
        self.drop_items(Fate::Missing, |what| matches!(what, What::Move { .. }));
    }

    fn drop_items(&mut self, fate: Fate, which: impl Fn(&What) -> bool) {
        let mut at = 0;
        while at < self.queue.len() {
            if which(&self.queue[at].what) { self.drop_item(at, fate) } else { at += 1 }
        }
    }

    /// This item needs to be waited for no more.
    fn written(&mut self, sequence: u64) {
        self.unfinished -= 1;
        for flush in self.flushes.iter_mut().filter(|flush| sequence < flush.before) {
            flush.left -= 1;
        }
    }

    // -- writing -----------------------------------------------------------------------------------------------------

    /// Sends batches. True if something else may be possible now.
    fn assemble(&mut self) -> bool {
        let mut changed = false;
        while self.may_write() && self.batches < BATCHES && !self.barrier && !self.queue.is_empty() {
            let Some(head) = self.head.or_else(|| self.spare.take()) else {
                return changed | self.give_up_moves();
            };
            if self.head.is_none() {
                (self.head, self.segment(head).stage, changed) = (Some(head), Stage::Head, true);
            }
            let (items, full) = self.next_items(head);
            if !items.is_empty() {
                self.send(head, items);
            } else if full {
                self.head = None;
                self.seal(head);
            } else {
                break;
            }
            changed = true;
        }
        changed
    }

    /// What the next batch consists of; and whether it is the segment that ended it.
    fn next_items(&mut self, head: FileId) -> (Vec<Item>, bool) {
        let (mut items, mut pages, mut blocks) = (Vec::new(), 0, 0);
        while let Some(item) = self.queue.front() {
            if let What::Move { record, from, .. } = &item.what
                && self.index.find(&record.place.key).map(|found| found.location) != Some(*from)
            {
                self.drop_item(0, Fate::Missing);
                continue;
            }
            let (more, key) = (item.pages(), item.key());
            match key {
                Some(key) if self.under_way.contains(&key) => break,
                // What goes for all keys stands alone, between what was before and what comes after.
                None if !items.is_empty() || self.batches > 0 => break,
                _ => {}
            }
            if items.len() == BATCH_ENTRIES
                || (more > 0 && blocks > 0 && (blocks == BATCH_BLOCKS || pages + more > BATCH_PAGES))
            {
                break;
            }
            if !self.segments[&head].has_room(items.len() + 1, pages + more) {
                return (items, true);
            }
            let Some(item) = self.queue.pop_front() else { break };
            (pages, blocks) = (pages + more, blocks + usize::from(more > 0));
            items.push(item);
            if key.is_none() {
                self.barrier = true;
                break;
            }
        }
        (items, false)
    }

    fn send(&mut self, head: FileId, items: Vec<Item>) {
        let segment = self.segments.get_mut(&head).expect("the head is a segment");
        let (life, first, header) = (segment.life, segment.cursor, header_pages(items.len()));
        let mut page = first + header;
        let (mut sent, mut blocks) = (Vec::with_capacity(items.len()), Vec::with_capacity(items.len() + 1));
        for item in items {
            let (more, key, sequence) = (item.pages(), item.key(), item.sequence);
            let (says, from) = match item.what {
                What::Write { op, record, block } => {
                    // Of the checksums that came with the bytes: so rot in DRAM shows when it is read.
                    let digest = digest((0..record.layout.strips).map(|strip| block.checksum(strip)));
                    blocks.push(Part::Block(block));
                    (Says::Block(record, digest), Sender::Write(op))
                }
                What::Move { reclaim, record, digest, from, pages } => {
                    blocks.push(Part::Pages(pages));
                    (Says::Block(record, digest), Sender::Move { reclaim, from })
                }
                What::Say(says) => {
                    self.removals -= 1;
                    (says, Sender::Say)
                }
            };
            self.under_way.extend(key);
            sent.push(Sent { sequence, entry: Entry { says, page: if more > 0 { page } else { first } }, from });
            page += more;
        }
        let entries: Vec<Entry> = sent.iter().map(|sent| sent.entry).collect();
        let head_pages = encode_batch(life, first, page - first, &entries);
        blocks.insert(0, Part::Pages(head_pages));
        segment.cursor = page;
        segment.entries += sent.len();
        segment.batches += 1;
        self.batches += 1;
        let offset = u64::from(first) * PAGE as u64;
        self.submit(head, Work::Write { offset, parts: blocks }, Doing::Batch { file: head, sent });
    }

    fn batch_ended(&mut self, file: FileId, sent: Vec<Sent>, done: bool) {
        self.batches -= 1;
        self.barrier = false;
        let segment = self.segment(file);
        segment.batches -= 1;
        segment.dirty = true;
        if done {
            segment.table.extend(sent.iter().map(|sent| sent.entry));
        } else {
            segment.hole = true;
        }
        let mut again = Vec::new();
        for Sent { sequence, entry, from } in sent {
            match (from, entry.says) {
                (Sender::Write(op), Says::Block(record, digest)) => {
                    let key = record.place.key;
                    self.waiting -= u64::from(block_pages(record.layout)) * PAGE as u64;
                    let wanted = self.pending.get(&key) == Some(&sequence);
                    let fate = match (wanted, done) {
                        (false, _) => Fate::Missing,
                        (true, true) => Fate::Done,
                        (true, false) => Fate::Failed,
                    };
                    if wanted {
                        self.pending.remove(&key);
                    }
                    if fate == Fate::Done {
                        self.index.insert(record, Location { file, page: entry.page }, digest);
                    }
                    self.under_way.remove(&key);
                    self.end_joined(sequence, fate);
                    self.end(op, fate);
                    self.written(sequence);
                }
                (Sender::Move { reclaim, from }, Says::Block(record, digest)) => {
                    let key = record.place.key;
                    if done && self.index.find(&key).map(|found| found.location) == Some(from) {
                        self.index.insert(record, Location { file, page: entry.page }, digest);
                    }
                    self.under_way.remove(&key);
                    self.moved(reclaim);
                    self.written(sequence);
                }
                (_, says) => {
                    if let Says::Removed(key) = says {
                        self.under_way.remove(&key);
                    }
                    if done {
                        self.written(sequence);
                    } else {
                        self.removals += 1;
                        again.push(Item { sequence, what: What::Say(says) });
                    }
                }
            }
        }
        again.into_iter().rev().for_each(|item| self.queue.push_front(item));
        if !done && self.head == Some(file) {
            self.head = None;
            self.seal(file);
        }
    }

    /// Nothing more goes into this segment.
    fn seal(&mut self, file: FileId) {
        self.segment(file).stage = Stage::Sealing { begun: false };
        self.order.push_back(file);
    }

    /// Writes the footers of segments whose batches have ended.
    fn finish_sealing(&mut self) -> bool {
        if !self.may_write() {
            return false;
        }
        let ready = |segment: &Segment| segment.stage == Stage::Sealing { begun: false } && segment.batches == 0;
        let files: Vec<FileId> = self.order.iter().copied().filter(|file| ready(&self.segments[file])).collect();
        for &file in &files {
            let segment = self.segments.get_mut(&file).expect("the order names segments");
            segment.stage = Stage::Sealing { begun: true };
            let footer = footer_pages(segment.table.len());
            // A file that is nearly full keeps its length: it is overwritten in place when it is used again.
            let cut = self.closing || segment.hole || segment.cursor + footer < segment.pages() / 8 * 7;
            let pages = if cut { segment.cursor + footer } else { segment.pages() };
            let work = Work::Finish {
                offset: u64::from(pages - footer) * PAGE as u64,
                footer: encode_footer(segment.life, pages, segment.cursor, &segment.table),
            };
            self.submit(file, work, Doing::Finish { file, bytes: u64::from(pages) * PAGE as u64 });
        }
        false
    }

    // -- room --------------------------------------------------------------------------------------------------------

    /// Sees to it that a spare segment is there. True if something else may be possible now.
    fn make_room(&mut self) -> bool {
        // Nothing is dropped before something is written; and at the end only what is needed.
        let writing = (self.head.is_some() && !self.closing) || (self.head.is_none() && !self.queue.is_empty());
        let wanted = self.spare.is_none() && writing;
        let busy = |doing: &Doing| matches!(doing, Doing::Prepare { .. } | Doing::Remove { .. });
        if !wanted || !self.may_write() || self.jobs.values().any(busy) {
            return false;
        }
        let vacant = self.segments.iter().find(|(_, segment)| segment.stage == Stage::Vacant).map(|(&file, _)| file);
        if let Some(file) = vacant {
            if self.used - self.segments[&file].bytes + self.segment_bytes <= self.limit {
                self.prepare(file);
            } else {
                self.submit(file, Work::Remove, Doing::Remove { file });
            }
            return false;
        }
        let unused =
            (0..FILES as FileId).find(|file| !self.segments.contains_key(file) && !self.foreign.contains(file));
        if let Some(file) = unused.filter(|_| self.used + self.segment_bytes <= self.limit) {
            let life = Life { store: 0, number: 0, nonce: 0 };
            self.segments.insert(file, Segment::vacant(life, 0));
            self.prepare(file);
            return false;
        }
        self.reclaim_oldest()
    }

    fn prepare(&mut self, file: FileId) {
        let life = Life { store: self.io.medium().store(), number: self.next_number, nonce: self.random.bits() };
        self.next_number += 1;
        let bytes = self.segment_bytes;
        let segment = self.segment(file);
        let before = segment.bytes;
        *segment = Segment { stage: Stage::Preparing, ..Segment::vacant(life, bytes) };
        self.used = self.used - before + bytes;
        self.submit(file, Work::Prepare { bytes, header: encode_life(life) }, Doing::Prepare { file });
    }

    // -- durability --------------------------------------------------------------------------------------------------

    pub(super) fn ask_flush(&mut self, asker: Asker) {
        let flush = match asker {
            // The moved blocks are written; those that wait may be waiting for just this.
            Asker::Reclaim(_) => Flush { asker, before: 0, left: 0 },
            _ => Flush { asker, before: self.next_sequence, left: self.unfinished },
        };
        self.flushes.push_back(flush);
    }

    pub(super) fn has_spare(&self) -> bool {
        self.spare.is_some()
    }

    /// Makes durable what was asked for. True if something else may be possible now.
    fn sync(&mut self) -> bool {
        let whole = || !self.segments.values().any(|segment| segment.hole);
        let ready = self.flushes.iter().any(|flush| flush.left == 0);
        if self.syncing.is_some() || !ready || !self.may_write() || !whole() {
            return false;
        }
        let askers = self.flushes.iter().filter(|flush| flush.left == 0).map(|flush| flush.asker).collect();
        self.flushes.retain(|flush| flush.left > 0);
        let dirty: Vec<FileId> =
            self.segments.iter().filter(|(_, segment)| segment.dirty).map(|(&file, _)| file).collect();
        self.syncing = Some(Syncing { askers, left: dirty.len(), failed: false });
        for &file in &dirty {
            self.segment(file).dirty = false;
            self.submit(file, Work::Sync, Doing::Sync { file });
        }
        if dirty.is_empty() {
            self.synced();
        }
        dirty.is_empty()
    }

    fn synced(&mut self) {
        let Some(Syncing { askers, failed, .. }) = self.syncing.take_if(|syncing| syncing.left == 0) else { return };
        askers.into_iter().for_each(|asker| self.flushed(asker, !failed));
    }

    fn flushed(&mut self, asker: Asker, done: bool) {
        match asker {
            Asker::User(op) => self.end(op, if done { Fate::Done } else { Fate::Failed }),
            Asker::Reclaim(number) => self.moves_are_durable(number, done),
            Asker::Probe => {
                if done {
                    self.well_again();
                }
            }
        }
    }

    /// Ends the flushes that wait: nothing can be written.
    pub(super) fn drop_flushes(&mut self) {
        for flush in std::mem::take(&mut self.flushes) {
            self.flushed(flush.asker, false);
        }
    }

    // -- what has ended ----------------------------------------------------------------------------------------------

    fn finished(&mut self, job: JobId, outcome: Outcome) {
        let Some(doing) = self.jobs.remove(&job) else { return };
        let writes = !matches!(doing, Doing::Load { .. } | Doing::Fetch { .. } | Doing::Probe);
        let error = if let Outcome::Failed(error) = &outcome { Some(error.to_string()) } else { None };
        let done = error.is_none();
        match doing {
            Doing::Batch { file, sent } => self.batch_ended(file, sent, done),
            Doing::Load { op, key, file } => {
                self.read_ended(&key, file);
                let fate = match outcome {
                    Outcome::Corrupt => {
                        self.forget(&key);
                        Fate::Corrupt
                    }
                    Outcome::Failed(_) => Fate::Failed,
                    _ => {
                        self.index.warm(&key);
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
        for (file, segment) in &self.segments {
            let holds = matches!(segment.stage, Stage::Head | Stage::Sealing { .. } | Stage::Sealed);
            assert!(holds || self.index.is_empty_in(*file), "segment {file} is {:?}", segment.stage);
        }
    }
}
