//! The tier that keeps nothing: it is full from the start.

use std::time::Duration;

use crate::memory::{ReadHold, WriteHold};
use crate::types::BlockKey;

use super::tier::{Capacity, Fate, OpId, Record, Tier, TierEvent, Whose};

/// Keeps nothing.
#[derive(Default)]
pub struct Null {
    events: Vec<TierEvent>,
    notify: Option<Box<dyn Fn() + Send>>,
}

impl Null {
    /// `notify` is called when `poll` has something to tell.
    pub fn notifying(mut self, notify: impl Fn() + Send + 'static) -> Self {
        self.notify = Some(Box::new(notify));
        self
    }

    fn end(&mut self, op: OpId, fate: Fate) {
        self.events.push(TierEvent::Ended { op, fate });
        self.notify.iter().for_each(|notify| notify());
    }
}

impl Tier for Null {
    fn write(&mut self, op: OpId, _record: Record, block: ReadHold) {
        drop(block);
        self.end(op, Fate::Full);
    }

    fn read(&mut self, op: OpId, _key: &BlockKey, into: WriteHold) {
        drop(into);
        self.end(op, Fate::Missing);
    }

    fn remove(&mut self, _key: &BlockKey) -> bool {
        false
    }

    fn clear(&mut self, _whose: Whose) -> Vec<BlockKey> {
        Vec::new()
    }

    fn find(&self, _key: &BlockKey) -> Option<Record> {
        None
    }

    fn records(&self) -> Box<dyn Iterator<Item = Record> + '_> {
        Box::new(std::iter::empty())
    }

    fn page(&self, _from: u32, _count: u32) -> (Vec<Record>, Option<u32>) {
        (Vec::new(), None)
    }

    fn flush(&mut self, op: OpId) {
        self.end(op, Fate::Done);
    }

    fn poll(&mut self) -> Vec<TierEvent> {
        std::mem::take(&mut self.events)
    }

    fn capacity(&self) -> Capacity {
        Capacity::default()
    }

    fn close(&mut self, _within: Duration) {}
}
