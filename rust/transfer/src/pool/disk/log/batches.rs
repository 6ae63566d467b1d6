//! How what waits gets into segments: batches, and the footer when a segment is full.

use super::super::format::{
    BATCH_ENTRIES, Entry, PAGE, Says, block_pages, digest, encode_batch, encode_footer, footer_pages, header_pages,
};
use super::super::index::Location;
use super::super::io::{FileId, Part, Work};
use super::queue::{Item, What};
use super::{Doing, Log, Segment, Stage};
use crate::pool::tier::{Fate, OpId};

/// Batches under way: enough to keep a disk busy, and half of the threads are left for reads.
const BATCHES: usize = 8;
/// Pages of blocks in a batch: 1 MiB, above which no disk gets faster.
const BATCH_PAGES: u32 = 256;
/// Blocks in a batch: as many as one page of header names.
const BATCH_BLOCKS: usize = 56;

/// What is remembered of an item whose batch is under way.
pub(in crate::pool::disk) struct Sent {
    pub sequence: u64,
    pub entry: Entry,
    pub from: Sender,
}

pub(in crate::pool::disk) enum Sender {
    Write(OpId),
    Move { reclaim: u64, from: Location },
    Say,
}

impl Log {
    /// Sends batches. True if something else may be possible now.
    pub(super) fn assemble(&mut self) -> bool {
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
    pub(super) fn next_items(&mut self, head: FileId) -> (Vec<Item>, bool) {
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

    pub(super) fn send(&mut self, head: FileId, items: Vec<Item>) {
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

    pub(super) fn batch_ended(&mut self, file: FileId, sent: Vec<Sent>, done: bool) {
        self.batches -= 1;
        self.barrier = false;
        let segment = self.segment(file);
        segment.batches -= 1;
        segment.dirty = true;
        if done {
            segment.table.extend(sent.iter().map(|sent| sent.entry));
        } else {
            segment.hole = true;
            // Some of it may lie there all the same, and show when the footer is gone.
            let blocks = sent.iter().filter_map(|sent| match sent.entry.says {
                Says::Block(record, _) => Some(record.place.key),
                _ => None,
            });
            self.ghosts.entry(file).or_default().extend(blocks);
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
                        let to = Location { file, page: entry.page };
                        self.index.insert(record, to, digest);
                        self.moved_from(&key, from, to);
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
    pub(super) fn seal(&mut self, file: FileId) {
        self.segment(file).stage = Stage::Sealing { begun: false };
        self.order.push_back(file);
        self.unsealed += 1;
    }

    /// Writes the footers of segments whose batches have ended.
    pub(super) fn finish_sealing(&mut self) -> bool {
        if self.unsealed == 0 || !self.may_write() {
            return false;
        }
        let ready = |segment: &Segment| segment.stage == Stage::Sealing { begun: false } && segment.batches == 0;
        let files: Vec<FileId> = self.order.iter().copied().filter(|file| ready(&self.segments[file])).collect();
        for &file in &files {
            let segment = self.segments.get_mut(&file).expect("the order names segments");
            segment.stage = Stage::Sealing { begun: true };
            self.unsealed -= 1;
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
}
