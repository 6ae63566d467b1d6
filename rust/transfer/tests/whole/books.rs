//! The naive model of one node's cache: what it has said of its blocks, and what must follow from that.

use std::collections::{BTreeMap, BTreeSet};

use pyengine_transfer::messages::{DaemonReport, Ticket};
use pyengine_transfer::types::{BlockKey, Medium};

use crate::behind::Behind;

/// What the conductor, and whoever asked for something durable, knows of a node.
#[derive(Debug, Default)]
pub struct Books {
    /// The next event's number, and what is published: the conductor's replica.
    next: u64,
    pub here: BTreeSet<(BlockKey, Medium)>,
    /// A new life has begun, and its first dump is awaited; with it, what must be in it.
    must: Option<BTreeSet<BlockKey>>,
    /// What must be on the SSD after any crash; and what must not be.
    durable: BTreeSet<BlockKey>,
    gone: BTreeSet<BlockKey>,
    /// Flushes that are not answered yet: what was published when they were asked for and has not been evicted since.
    asked: BTreeMap<Ticket, BTreeSet<BlockKey>>,
    /// Deletions that are not durable yet: what has not been stored again since.
    deleted: BTreeMap<u64, BTreeSet<BlockKey>>,
    /// Bytes of its SSD have changed behind its back in this life: nothing is promised of the next one's start.
    spoiled: bool,
    dump: BTreeSet<(BlockKey, Medium)>,
    part: u32,
}

impl Books {
    pub fn has(&self, key: &BlockKey) -> bool {
        Medium::ALL.iter().any(|medium| self.here.contains(&(*key, *medium)))
    }

    pub fn keys(&self) -> BTreeSet<BlockKey> {
        self.here.iter().map(|(key, _)| *key).collect()
    }

    /// A life of the node ends. `all`: by a stop that had time and room for all.
    pub fn end(&mut self, behind: &Behind, all: bool) {
        let mut must = std::mem::take(&mut self.durable);
        // What the tier let go of, and could not tell any more.
        must.retain(|key| behind.has(key));
        if all {
            must.extend(self.keys());
        }
        if std::mem::take(&mut self.spoiled) {
            must.clear();
            self.gone.clear();
        }
        self.asked.clear();
        self.deleted.clear();
        self.must = Some(must);
    }

    /// Another life begins with this event.
    pub fn begin(&mut self, next: u64) {
        (self.next, self.part) = (next, 0);
        self.must.get_or_insert_default();
        self.here.clear();
        self.dump.clear();
    }

    pub fn is_spoiled(&self) -> bool {
        self.spoiled
    }

    /// Bytes of its SSD have changed behind its back.
    pub fn spoil(&mut self) {
        self.spoiled = true;
    }

    /// How many blocks the next dump must have.
    pub fn expected(&self) -> u64 {
        self.must.as_ref().map_or(0, |must| must.len() as u64)
    }

    pub fn report(&mut self, node: &str, report: DaemonReport) {
        match report {
            DaemonReport::Stored { sequence, key, medium, .. } => {
                self.follows(node, sequence);
                assert!(self.here.insert((key, medium)), "{node} stored {key:?} twice on {medium:?}");
                self.gone.remove(&key);
                self.deleted.values_mut().for_each(|keys| {
                    keys.remove(&key);
                });
            }
            DaemonReport::Removed { sequence, key, medium } => {
                self.follows(node, sequence);
                let there = self.here.remove(&(key, medium));
                assert!(there, "{node} removed {key:?} from {medium:?}, which had it not");
                if medium == Medium::Ssd {
                    self.durable.remove(&key);
                }
                // Evicted altogether, or from the SSD, be it just after it was durable.
                if medium == Medium::Ssd || !self.has(&key) {
                    self.asked.values_mut().for_each(|keys| {
                        keys.remove(&key);
                    });
                }
            }
            DaemonReport::Heartbeat { next_sequence, count, xor, .. } => {
                assert_eq!(
                    (next_sequence, count),
                    (self.next, self.here.len() as u64),
                    "{node} and its replica differ"
                );
                let fold = |mut sum: [u8; 16], (key, medium): &(BlockKey, Medium)| {
                    let mut key = key.0;
                    key.rotate_left(usize::from(*medium == Medium::Ssd));
                    sum.iter_mut().zip(key).for_each(|(sum, byte)| *sum ^= byte);
                    sum
                };
                assert_eq!(xor.0, self.here.iter().fold([0; 16], fold), "{node} and its replica hold other keys");
            }
            DaemonReport::Dump { sequence, part, blocks, last } => {
                assert_eq!((sequence, part), (self.next, self.part), "{node} dumps out of order");
                for (key, _, _, medium) in blocks {
                    assert!(self.dump.insert((key, medium)), "{node} dumps {key:?} twice");
                }
                self.part = if last { 0 } else { part + 1 };
                if last {
                    let dumped = std::mem::take(&mut self.dump);
                    self.dumped(node, dumped);
                }
            }
            DaemonReport::Replicated { .. } | DaemonReport::Cleared { .. } | DaemonReport::Hello { .. } => {}
        }
    }

    fn follows(&mut self, node: &str, sequence: u64) {
        assert_eq!(sequence, self.next, "{node} skipped an event");
        self.next += 1;
    }

    fn dumped(&mut self, node: &str, dumped: BTreeSet<(BlockKey, Medium)>) {
        let Some(must) = self.must.take() else {
            assert_eq!(dumped, self.here, "{node} dumps other keys than it has reported");
            return;
        };
        let lost: Vec<_> = must.iter().filter(|key| !dumped.contains(&(**key, Medium::Ssd))).collect();
        assert!(lost.is_empty(), "{node} has lost {lost:?}, which was durable");
        self.here = dumped;
        let back: Vec<_> = self.gone.iter().filter(|key| self.has(key)).collect();
        assert!(back.is_empty(), "{node} has {back:?} again, which was deleted durably");
        self.durable = must;
    }

    /// A client wants all that is published to outlive the node.
    pub fn flush(&mut self, ticket: Ticket) {
        let keys = self.keys();
        self.asked.insert(ticket, keys);
    }

    /// And is told. Returns how many blocks are durable by it.
    pub fn flushed(&mut self, node: &str, ticket: Ticket, ok: bool) -> u64 {
        let Some(keys) = self.asked.remove(&ticket).filter(|_| ok) else { return 0 };
        let missing: Vec<_> = keys.iter().filter(|key| !self.here.contains(&(**key, Medium::Ssd))).collect();
        assert!(missing.is_empty(), "{node} calls {missing:?} durable, which is not on its SSD");
        let count = keys.len() as u64;
        self.durable.extend(keys);
        count
    }

    /// These were deleted, as far as nobody holds them; whoever asked waits for this number.
    pub fn delete(&mut self, number: u64, keys: impl IntoIterator<Item = BlockKey>) {
        let keys = keys.into_iter().filter(|key| !self.has(key)).collect();
        self.deleted.insert(number, keys);
    }

    /// And is told.
    pub fn deleted(&mut self, number: u64, ok: bool) -> u64 {
        let Some(keys) = self.deleted.remove(&number).filter(|_| ok) else { return 0 };
        let count = keys.len() as u64;
        self.gone.extend(keys);
        count
    }
}
