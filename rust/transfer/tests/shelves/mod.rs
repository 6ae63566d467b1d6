//! What the tests of tiers share: arenas to write from and read into, and a desk that waits for the ends of operations.
#![allow(dead_code, reason = "each test program uses its part")]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use pyengine_transfer::memory::{Arena, ReadHold, checksum};
use pyengine_transfer::pool::Place;
use pyengine_transfer::pool::tier::{Fate, OpId, Record, Tier, TierEvent};
use pyengine_transfer::random::Random;
use pyengine_transfer::types::{BlockKey, Layout, Owner, SlotRef};

/// Two pages with padding; and five without.
pub const LAYOUTS: [Layout; 2] = [Layout { strips: 3, strip_bytes: 2000 }, Layout { strips: 5, strip_bytes: 4096 }];
/// Long enough for a machine that is busy with everything else.
pub const PATIENCE: Duration = Duration::from_secs(120);

pub fn key(number: u32) -> BlockKey {
    let mut bytes = [7; 16];
    bytes[..4].copy_from_slice(&number.to_le_bytes());
    BlockKey(bytes)
}

pub fn number(key: &BlockKey) -> u32 {
    u32::from_le_bytes([key.0[0], key.0[1], key.0[2], key.0[3]])
}

/// What is said of block `number`: a third of them are large, the owners differ.
pub fn record(number: u32) -> Record {
    let place = Place { key: key(number), parent: key(number.wrapping_sub(1)), position: number % 50 };
    let owner = Owner { namespace: u64::from(number % 2), tenant: u64::from(number % 3) };
    Record { place, owner, layout: LAYOUTS[usize::from(number.is_multiple_of(3))] }
}

/// Bytes of a block, which a failing test does not print.
#[derive(Clone, PartialEq, Eq)]
pub struct Bytes(pub Vec<u8>);

impl std::fmt::Debug for Bytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes with CRC {:08x}", self.0.len(), checksum(&self.0))
    }
}

/// The bytes of a version of a block.
pub fn content(record: &Record, version: u32) -> Bytes {
    let mut random = Random(u64::from(number(&record.place.key)) << 32 | u64::from(version));
    let words = record.layout.block_bytes().div_ceil(8);
    let bytes: Vec<u8> = (0..words).flat_map(|_| random.bits().to_le_bytes()).collect();
    Bytes(bytes[..record.layout.block_bytes()].to_vec())
}

/// What a tier calls when it has something to tell.
pub fn bell() -> (impl Fn() + Send + Sync + Clone + 'static, mpsc::Receiver<()>) {
    let (ring, rung) = mpsc::channel();
    let ring = move || {
        // The test may have ended.
        let _ = ring.send(());
    };
    (ring, rung)
}

/// A tier and one user of it.
pub struct Desk {
    pub tier: Box<dyn Tier>,
    rung: mpsc::Receiver<()>,
    arenas: Vec<Arc<Arena>>,
    next_op: OpId,
    /// Operations that have not ended.
    pub open: BTreeSet<OpId>,
    pub fates: BTreeMap<OpId, Fate>,
    /// What it let go of, in order.
    pub dropped: Vec<BlockKey>,
    /// All that it told since somebody last took it.
    pub told: Vec<TierEvent>,
    reads: BTreeMap<OpId, (usize, SlotRef)>,
}

impl Desk {
    pub fn new(tier: Box<dyn Tier>, rung: mpsc::Receiver<()>) -> Self {
        let arenas = LAYOUTS.map(|layout| Arena::create(4 << 20, layout).expect("a small arena"));
        Self {
            tier,
            rung,
            arenas: arenas.into(),
            next_op: 0,
            open: BTreeSet::new(),
            fates: BTreeMap::new(),
            dropped: Vec::new(),
            told: Vec::new(),
            reads: BTreeMap::new(),
        }
    }

    /// Another life of the tier.
    pub fn replace(&mut self, tier: Box<dyn Tier>, rung: mpsc::Receiver<()>) {
        (self.tier, self.rung) = (tier, rung);
        self.open.clear();
        self.reads.clear();
    }

    fn op(&mut self) -> OpId {
        self.next_op += 1;
        self.open.insert(self.next_op);
        self.next_op
    }

    /// A slot that nobody uses.
    fn slot(&mut self, layout: Layout) -> (usize, SlotRef) {
        let which = LAYOUTS.iter().position(|&known| known == layout).expect("a layout of the tests");
        loop {
            let arena = &self.arenas[which];
            let reading = |slot: u32| self.reads.values().any(|(arena, used)| *arena == which && used.slot == slot);
            if let Some(slot) = (0..arena.slots()).find(|&slot| arena.quiet(slot) && !reading(slot)) {
                return (which, arena.issue(slot));
            }
            self.step();
        }
    }

    fn sealed(&mut self, record: &Record, bytes: &[u8]) -> ReadHold {
        let (which, slot) = self.slot(record.layout);
        let arena = &self.arenas[which];
        let mut hold = arena.begin_write(slot, 0..record.layout.strips).expect("a new life");
        hold.strips_mut(0..record.layout.strips).copy_from_slice(bytes);
        for (strip, bytes) in (0..).zip(bytes.chunks_exact(record.layout.strip_bytes as usize)) {
            hold.set_checksum(strip, checksum(bytes));
        }
        drop(hold);
        assert!(arena.seal(slot));
        let hold = arena.begin_read(slot).expect("sealed");
        // The tier's hold is what keeps it.
        arena.retire(slot);
        hold
    }

    pub fn write(&mut self, record: Record, version: u32) -> OpId {
        let block = self.sealed(&record, &content(&record, version).0);
        let op = self.op();
        self.tier.write(op, record, block);
        op
    }

    /// As [`Desk::write`], with a strip's checksum that is not that of its bytes: rot in DRAM.
    pub fn write_rotten(&mut self, record: Record) -> OpId {
        let block = self.sealed(&record, &content(&record, 0).0);
        let which = LAYOUTS.iter().position(|&known| known == record.layout).expect("a layout of the tests");
        self.arenas[which].corrupt_for_test(block.slot().slot, 1);
        let op = self.op();
        self.tier.write(op, record, block);
        op
    }

    pub fn read(&mut self, record: &Record) -> OpId {
        let (which, slot) = self.slot(record.layout);
        let into = self.arenas[which].begin_write(slot, 0..record.layout.strips).expect("a new life");
        let op = self.op();
        self.reads.insert(op, (which, slot));
        self.tier.read(op, &record.place.key, into);
        op
    }

    /// What a read that has ended brought: the bytes if it is `Done`.
    pub fn read_result(&mut self, op: OpId) -> Result<Bytes, Fate> {
        let (which, slot) = self.reads.remove(&op).expect("a read");
        let (arena, fate) = (&self.arenas[which], self.fates[&op]);
        assert!(arena.quiet(slot.slot), "its hold is gone when it has ended");
        assert_eq!(arena.arrived_all(slot), fate == Fate::Done);
        let result = if fate == Fate::Done {
            assert!(arena.seal(slot) && arena.intact(slot), "checksums are set, and right");
            Ok(Bytes(arena.begin_read(slot).expect("sealed").bytes().to_vec()))
        } else {
            Err(fate)
        };
        arena.retire(slot);
        result
    }

    pub fn verify(&mut self, key: &BlockKey) -> OpId {
        let op = self.op();
        assert!(self.tier.verify(op, key), "it keeps something");
        op
    }

    pub fn flush(&mut self) -> OpId {
        let op = self.op();
        self.tier.flush(op);
        op
    }

    /// Looks once, without waiting.
    pub fn poll(&mut self) {
        for event in self.tier.poll() {
            self.told.push(event);
            match event {
                TierEvent::Ended { op, fate } => {
                    assert!(self.open.remove(&op), "operation {op} ended twice, or was never begun: {fate:?}");
                    self.fates.insert(op, fate);
                }
                TierEvent::Dropped(key) => self.dropped.push(key),
            }
        }
        let capacity = self.tier.capacity();
        assert!(capacity.used <= capacity.limit, "{capacity:?}");
    }

    /// Waits until something has happened.
    fn step(&mut self) {
        self.poll();
        if !self.open.is_empty() {
            self.rung.recv_timeout(PATIENCE).expect("something happens");
            self.poll();
        }
    }

    pub fn wait(&mut self, op: OpId) -> Fate {
        self.poll();
        while !self.fates.contains_key(&op) {
            self.rung.recv_timeout(PATIENCE).expect("every operation ends");
            self.poll();
        }
        self.fates[&op]
    }

    pub fn wait_all(&mut self) {
        while let Some(&op) = self.open.first() {
            self.wait(op);
        }
    }

    // -- and to its end ----------------------------------------------------------------------------------------------

    pub fn put(&mut self, record: Record, version: u32) -> Fate {
        let op = self.write(record, version);
        self.wait(op)
    }

    pub fn get(&mut self, record: &Record) -> Result<Bytes, Fate> {
        let op = self.read(record);
        self.wait(op);
        self.read_result(op)
    }

    pub fn keys(&self) -> BTreeSet<BlockKey> {
        self.tier.records().map(|record| record.place.key).collect()
    }

    /// Panics unless this life found all blocks of the last, which had `before` of them and let go of `dropped`. It may find such a
    /// one, too: one that goes to make room lies on the disk until its segment is used again.
    pub fn check_found(&self, before: &BTreeSet<BlockKey>) {
        let found = self.keys();
        let lost: Vec<u32> = (before - &found).iter().map(number).collect();
        let dropped: BTreeSet<BlockKey> = self.dropped.iter().copied().collect();
        let risen: Vec<u32> = (&(&found - before) - &dropped).iter().map(number).collect();
        assert!(lost.is_empty() && risen.is_empty(), "lost {lost:?}, found although never dropped {risen:?}");
    }
}
