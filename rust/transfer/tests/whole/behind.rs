//! What a node has behind its arena, which outlives it.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use pyengine_transfer::memory::{ReadHold, WriteHold};
use pyengine_transfer::pool::disk::twin::MemoryDisk;
use pyengine_transfer::pool::disk::{OVERHEAD, Ssd};
use pyengine_transfer::pool::tier::{Capacity, Health, OpId, Record, Tier, TierEvent, Whose};
use pyengine_transfer::pool::twin::{MemoryTier, Shelf};
use pyengine_transfer::random::Random;
use pyengine_transfer::types::BlockKey;

/// Eight segments of 64 KiB, of which blocks take one page or two: about half of all keys fit.
const SMALL: u64 = (8 << 16) + OVERHEAD;
/// All keys and the objects of a run fit many times.
const LARGE: u64 = 64 * SMALL;

pub enum Behind {
    Nothing,
    Shelf { shelf: Shelf, limit: u64 },
    Log { disks: Vec<MemoryDisk>, limit: u64, ssd: Option<Shared> },
}

impl Behind {
    pub fn any(random: &mut Random) -> Self {
        let large = random.permille(600);
        match random.below(10) {
            0 => Self::Nothing,
            1 | 2 => Self::Shelf { shelf: Shelf::default(), limit: if large { LARGE } else { 2000 } },
            // Now and then two devices.
            kind => {
                let disks = vec![MemoryDisk::default(); if kind == 3 { 2 } else { 1 }];
                let disks: Vec<MemoryDisk> = disks.iter().map(MemoryDisk::copy).collect();
                let limit = disks.len() as u64 * if large { LARGE } else { SMALL };
                Self::Log { disks, limit, ssd: None }
            }
        }
    }

    /// The tier of a new life.
    pub fn open(&mut self, seed: u64, bell: Box<dyn Fn() + Send + Sync>) -> Option<Box<dyn Tier>> {
        match self {
            Self::Nothing => None,
            Self::Shelf { shelf, limit } => {
                Some(Box::new(MemoryTier::new(shelf.clone(), *limit, *limit / 4).notifying(bell)))
            }
            Self::Log { disks, limit, ssd } => {
                // The old life's.
                *ssd = None;
                let bell = Arc::new(bell);
                let open = |disks: &[MemoryDisk]| {
                    let mediums = disks.iter().map(|disk| Arc::new(disk.clone()) as _).collect();
                    let bell = bell.clone();
                    Ssd::over(mediums, *limit, 0, seed, move || bell())
                };
                // One that cannot be read yet is not begun with.
                let opened = open(disks).or_else(|_| {
                    disks.iter().for_each(well);
                    open(disks)
                });
                let shared = Shared(Arc::new(Mutex::new(opened.expect("a disk that does well can be opened"))));
                *ssd = Some(shared.clone());
                Some(Box::new(shared))
            }
        }
    }

    /// The machine loses its power: a part of what was not synced is gone.
    pub fn lose_power(&mut self, random: &mut Random) {
        if let Self::Log { disks, .. } = self {
            disks.iter_mut().for_each(|disk| *disk = disk.crashed(random));
        }
    }

    /// Something goes wrong with the medium. True: bytes have changed that were durable.
    pub fn harm(&mut self, random: &mut Random, some: Option<BlockKey>) -> bool {
        match self {
            Self::Nothing => false,
            Self::Shelf { shelf, .. } => match random.below(3) {
                0 => {
                    shelf.set_health(Health::ReadOnly);
                    false
                }
                1 => {
                    shelf.set_health(Health::Failed);
                    false
                }
                // Only this block's: it is found when it is read.
                _ => {
                    some.map(|key| shelf.rot(&key));
                    false
                }
            },
            Self::Log { disks, .. } => {
                let disk = &disks[random.below(disks.len() as u64) as usize];
                match random.below(6) {
                    0 => disk.fail(false, true),
                    1 => disk.fail(true, true),
                    2 => disk.fail_once_after(Some(random.below(6))),
                    3 => disk.stop_after(Some(random.below(12))),
                    4 => disk.set_room(Some(disk.files().iter().map(|(_, bytes)| bytes).sum())),
                    _ => {
                        let files = disk.files();
                        if files.is_empty() {
                            return false;
                        }
                        let (file, length) = files[random.below(files.len() as u64) as usize];
                        let (at, bit) = (random.below(length.max(1)) as usize, random.below(8));
                        disk.alter(file, |bytes| bytes.iter_mut().skip(at).take(1).for_each(|byte| *byte ^= 1 << bit));
                        return true;
                    }
                }
                false
            }
        }
    }

    /// It does well again.
    pub fn heal(&self) {
        match self {
            Self::Nothing => {}
            Self::Shelf { shelf, .. } => shelf.set_health(Health::Good),
            Self::Log { disks, .. } => disks.iter().for_each(well),
        }
    }

    pub fn is_there(&self) -> bool {
        !matches!(self, Self::Nothing)
    }

    /// True if all keys and objects of a run fit.
    pub fn has_room(&self) -> bool {
        match self {
            Self::Nothing => false,
            Self::Shelf { limit, .. } => *limit >= LARGE,
            Self::Log { limit, disks, .. } => *limit >= LARGE * disks.len() as u64,
        }
    }

    /// True if all that is written now stays, and nothing is pushed out.
    pub fn keeps_all(&self) -> bool {
        let good = match self {
            Self::Log { ssd: Some(ssd), .. } => ssd.lock().capacity().health == Health::Good,
            _ => true,
        };
        self.has_room() && good
    }

    /// True if a read would find this block, whatever was told of it by now.
    pub fn has(&self, key: &BlockKey) -> bool {
        match self {
            Self::Log { ssd: Some(ssd), .. } => ssd.lock().find(key).is_some(),
            Self::Shelf { shelf, limit } => MemoryTier::new(shelf.clone(), *limit, 0).find(key).is_some(),
            Self::Nothing | Self::Log { ssd: None, .. } => false,
        }
    }

    /// Its numbers, for a person.
    pub fn describe(&self) -> String {
        match self {
            Self::Nothing => "nothing".into(),
            Self::Shelf { limit, .. } => format!("a shelf of {limit} bytes"),
            Self::Log { ssd, disks, .. } => {
                format!("{} disks, {:?}", disks.len(), ssd.as_ref().map(|ssd| ssd.lock().capacity()))
            }
        }
    }

    /// Asserts that the limit is kept.
    pub fn check(&self) {
        if let Self::Log { disks, limit, .. } = self {
            let used: u64 = disks.iter().map(MemoryDisk::peak).sum();
            assert!(used <= *limit, "{used} bytes lay on disks that may have {limit}");
        }
    }
}

fn well(disk: &MemoryDisk) {
    disk.fail(false, false);
    disk.fail_once_after(None);
    disk.stop_after(None);
    disk.set_room(None);
}

/// A log that the test looks at beside the engine that has it. Checked after all that it does.
#[derive(Clone)]
pub struct Shared(Arc<Mutex<Ssd>>);

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Ssd> {
        self.0.lock().expect("whoever panicked has ended the test")
    }

    fn checked<R>(&self, work: impl FnOnce(&mut Ssd) -> R) -> R {
        let mut ssd = self.lock();
        let result = work(&mut ssd);
        ssd.check();
        let Capacity { used, limit, .. } = ssd.capacity();
        assert!(used <= limit, "the tier takes {used} bytes of {limit}");
        result
    }
}

impl Tier for Shared {
    fn write(&mut self, op: OpId, record: Record, block: ReadHold) {
        self.checked(|ssd| ssd.write(op, record, block));
    }

    fn read(&mut self, op: OpId, key: &BlockKey, into: WriteHold) {
        self.checked(|ssd| ssd.read(op, key, into));
    }

    fn remove(&mut self, key: &BlockKey) -> bool {
        self.checked(|ssd| ssd.remove(key))
    }

    fn clear(&mut self, whose: Whose) -> Vec<BlockKey> {
        self.checked(|ssd| ssd.clear(whose))
    }

    fn find(&self, key: &BlockKey) -> Option<Record> {
        self.lock().find(key)
    }

    fn records(&self) -> Box<dyn Iterator<Item = Record> + '_> {
        Box::new(self.lock().records().collect::<Vec<_>>().into_iter())
    }

    fn page(&self, from: u32, count: u32) -> (Vec<Record>, Option<u32>) {
        self.lock().page(from, count)
    }

    fn flush(&mut self, op: OpId) {
        self.checked(|ssd| ssd.flush(op));
    }

    fn poll(&mut self) -> Vec<TierEvent> {
        self.checked(Ssd::poll)
    }

    fn capacity(&self) -> Capacity {
        self.lock().capacity()
    }

    fn health_of(&self, key: &BlockKey) -> Health {
        self.lock().health_of(key)
    }

    fn close(&mut self, within: Duration) {
        self.lock().close(within);
    }
}
