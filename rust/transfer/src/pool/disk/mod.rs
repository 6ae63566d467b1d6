//! The tier on solid-state disks: one log per directory, a key belongs to one of them.
//!
//! [`format`] says what lies on a disk, [`io`] is the seam under the log with its [`directory`] of real files, its [`ring`] to them and its
//! [`twin`] in memory, [`log`] writes, [`reclaim`] makes room, [`recover`] begins, [`trouble`] is for devices that fail, [`index`] knows
//! what is where.

mod directory;
pub mod format;
mod index;
pub mod io;
mod log;
mod reclaim;
mod recover;
mod ring;
mod trouble;
pub mod twin;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use rustc_hash::FxHashMap;

use crate::error::Error;
use crate::memory::{ReadHold, WriteHold};
use crate::types::{BlockKey, Layout, Owner};

use super::tier::{Capacity, Fate, Health, OpId, Record, Tier, TierEvent, Whose};
use directory::Directory;
use format::PAGE;
pub use io::By;
use io::Medium;
use log::Log;
use ring::Ring;

/// What a directory takes beside its segments: the pages of `format` and `lock`.
pub const OVERHEAD: u64 = 2 * PAGE as u64;
/// Threads of a device: so many requests it has before it at once. They sleep in the kernel nearly all the time.
const THREADS: usize = 16;
/// With a ring they are left with what is rare: a file prepared, another finished, a sync, while a third is removed.
const THREADS_BESIDE_RING: usize = 4;
/// The least that a device can be given: eight segments of 64 KiB.
const LEAST: u64 = (8 << 16) + OVERHEAD;

/// Bytes of a segment. One in 64 is reclaimed at a time; a large block wants larger segments (four of 16 MiB fit), a small
/// limit smaller ones, so that there are always eight.
pub fn segment_bytes(limit: u64) -> u64 {
    let room = limit - OVERHEAD;
    let bytes = (room / 64).max((room / 16).min(64 << 20)).clamp((room / 8).min(4 << 20), 1 << 30);
    bytes / PAGE as u64 * PAGE as u64
}

/// A flush of all devices.
struct Flushing {
    left: usize,
    worst: Fate,
}

/// Blocks on solid-state disks.
pub struct Ssd {
    devices: Vec<Log>,
    flushing: FxHashMap<OpId, Flushing>,
}

impl Ssd {
    /// Opens the directories (made if they are not there); each gets an equal share of the limit. `notify` is called, by any
    /// thread, when [`Tier::poll`] has something to do or to tell.
    ///
    /// # Errors
    /// Give up: a directory cannot be used, and why; the limit is too small. Retry: a device failed.
    pub fn open(
        directories: &[PathBuf],
        limit_bytes: u64,
        notify: impl Fn() + Send + Sync + 'static,
    ) -> Result<Self, Error> {
        // One for each, or none: the kernel may have one and not four.
        let rings = Self::rings(directories.len())
            .inspect_err(|error| tracing::info!("SSD: read and written by threads: {error}"));
        Self::open_with(rings.ok(), directories, limit_bytes, notify)
    }

    /// The same, in this way.
    ///
    /// # Errors
    /// As for [`Ssd::open`]; and give up: the kernel lacks this way, and why.
    pub fn open_by(
        by: By,
        directories: &[PathBuf],
        limit_bytes: u64,
        notify: impl Fn() + Send + Sync + 'static,
    ) -> Result<Self, Error> {
        let rings = if by == By::Ring { Some(Self::rings(directories.len())?) } else { None };
        Self::open_with(rings, directories, limit_bytes, notify)
    }

    fn rings(count: usize) -> Result<Vec<Ring>, Error> {
        (0..count).map(|_| Ring::new()).collect()
    }

    fn open_with(
        rings: Option<Vec<Ring>>,
        directories: &[PathBuf],
        limit_bytes: u64,
        notify: impl Fn() + Send + Sync + 'static,
    ) -> Result<Self, Error> {
        Self::check_limit(directories.len(), limit_bytes)?;
        let threads = if rings.is_some() { THREADS_BESIDE_RING } else { THREADS };
        let mut rings = rings.into_iter().flatten();
        let mut mediums: Vec<(Arc<dyn Medium>, Option<Ring>)> = Vec::new();
        for path in directories {
            mediums.push((Arc::new(Directory::open(path)?), rings.next()));
        }
        Self::begin(mediums, limit_bytes, threads, directory::random()?, notify)
    }

    /// The same over any mediums. Without threads all is done in [`Tier::poll`].
    ///
    /// # Errors
    /// As for [`Ssd::open`].
    pub fn over(
        mediums: Vec<Arc<dyn Medium>>,
        limit_bytes: u64,
        threads: usize,
        seed: u64,
        notify: impl Fn() + Send + Sync + 'static,
    ) -> Result<Self, Error> {
        Self::check_limit(mediums.len(), limit_bytes)?;
        let mediums = mediums.into_iter().map(|medium| (medium, None)).collect();
        Self::begin(mediums, limit_bytes, threads, seed, notify)
    }

    fn begin(
        mediums: Vec<(Arc<dyn Medium>, Option<Ring>)>,
        limit_bytes: u64,
        threads: usize,
        seed: u64,
        notify: impl Fn() + Send + Sync + 'static,
    ) -> Result<Self, Error> {
        let limit = limit_bytes / mediums.len() as u64;
        let notify: Arc<dyn Fn() + Send + Sync> = Arc::new(notify);
        let log = |(medium, ring)| Log::recover(medium, threads, ring, notify.clone(), limit, seed);
        let devices = mediums.into_iter().map(log).collect::<Result<_, _>>()?;
        let mut ssd = Self { devices, flushing: FxHashMap::default() };
        ssd.drop_doubles();
        Ok(ssd)
    }

    /// A directory that was away may hold what was written elsewhere meanwhile: one copy counts.
    fn drop_doubles(&mut self) {
        for device in 1..self.devices.len() {
            let (before, behind) = self.devices.split_at_mut(device);
            let twice = |key: &BlockKey| before.iter().any(|device| device.find(key).is_some());
            let doubles: Vec<_> = behind[0].records().map(|record| record.place.key).filter(twice).collect();
            doubles.iter().for_each(|key| behind[0].forget_silently(key));
        }
    }

    fn check_limit(devices: usize, limit_bytes: u64) -> Result<(), Error> {
        if devices == 0 {
            return Err(Error::bug("an SSD tier needs a directory"));
        }
        let least = LEAST * devices as u64;
        if limit_bytes < least {
            return Err(Error::give_up(format!(
                "{limit_bytes} bytes of SSD are too few for {devices} directories: give at least {least}, and eight times \
                 the largest block"
            )));
        }
        Ok(())
    }

    /// The device that has a block or is about to; else the one that would get it. (A block may lie elsewhere than it would
    /// go: the list of directories can change from start to start.)
    fn device(&self, key: &BlockKey) -> usize {
        let has = |device: &Log| device.find(key).is_some() || device.expects(key);
        if self.devices.len() == 1 {
            return 0;
        }
        self.devices.iter().position(has).unwrap_or_else(|| {
            // The upper half of a product spreads evenly over any number of devices.
            ((u128::from(index::hash(&key.0)) * self.devices.len() as u128) >> 64) as usize
        })
    }

    /// Bytes of memory that it takes to know where its blocks are.
    pub fn index_bytes(&self) -> usize {
        self.devices.iter().map(|device| device.index.memory()).sum()
    }

    /// Panics if its parts contradict each other. For tests.
    pub fn check(&self) {
        self.devices.iter().for_each(Log::check);
    }
}

impl Tier for Ssd {
    fn write(&mut self, op: OpId, record: Record, block: ReadHold) {
        let device = self.device(&record.place.key);
        self.devices[device].write(op, record, block);
    }

    fn read(&mut self, op: OpId, key: &BlockKey, into: WriteHold) {
        let device = self.device(key);
        self.devices[device].read(op, key, into);
    }

    fn verify(&mut self, op: OpId, key: &BlockKey) -> bool {
        let device = self.device(key);
        self.devices[device].verify(op, key);
        true
    }

    fn remove(&mut self, key: &BlockKey) -> bool {
        // Each, as another may hold a copy that does not count.
        self.devices.iter_mut().fold(false, |there, device| device.remove(key) | there)
    }

    fn clear(&mut self, whose: Whose) -> Vec<BlockKey> {
        self.devices.iter_mut().flat_map(|device| device.clear(whose)).collect()
    }

    fn find(&self, key: &BlockKey) -> Option<Record> {
        self.devices[self.device(key)].find(key)
    }

    fn records(&self) -> Box<dyn Iterator<Item = Record> + '_> {
        Box::new(self.devices.iter().flat_map(Log::records))
    }

    fn usage(&self) -> Vec<(Owner, Layout, u64)> {
        // An owner may come once for each device.
        self.devices.iter().flat_map(Log::usage).collect()
    }

    /// The devices in turn, so that the place of a block stays while they grow.
    fn page(&self, from: u32, count: u32) -> (Vec<Record>, Option<u32>) {
        let devices = self.devices.len() as u64;
        let (from, until) = (u64::from(from), u64::from(from) + u64::from(count));
        let end = self.devices.iter().map(Log::places).max().map_or(0, |places| u64::from(places) * devices);
        let at = |place: u64| self.devices[(place % devices) as usize].place((place / devices) as u32);
        let records = (from..until.min(end)).filter_map(at).collect();
        (records, u32::try_from(until).ok().filter(|_| until < end))
    }

    fn flush(&mut self, op: OpId) {
        self.flushing.insert(op, Flushing { left: self.devices.len(), worst: Fate::Done });
        self.devices.iter_mut().for_each(|device| device.flush(op));
    }

    fn poll(&mut self) -> Vec<TierEvent> {
        let mut events: Vec<TierEvent> = self.devices.iter_mut().flat_map(Log::poll).collect();
        // A flush is over when it is on every device.
        events.retain_mut(|event| {
            let TierEvent::Ended { op, fate } = event else { return true };
            let Some(flushing) = self.flushing.get_mut(op) else { return true };
            flushing.left -= 1;
            if *fate != Fate::Done {
                flushing.worst = *fate;
            }
            *fate = flushing.worst;
            flushing.left == 0
        });
        for event in &events {
            if let TierEvent::Ended { op, .. } = event {
                self.flushing.remove(op);
            }
        }
        events
    }

    fn io(&self) -> &'static str {
        self.devices.first().map_or("", |device| device.io.by().name())
    }

    fn capacity(&self) -> Capacity {
        let mut sum = Capacity::default();
        for Capacity { limit, used, blocks, waiting, health } in self.devices.iter().map(Log::capacity) {
            sum.limit += limit;
            sum.used += used;
            sum.blocks += blocks;
            sum.waiting += waiting;
            // One that does well serves its share: the worst is shown, as somebody has to look.
            sum.health = sum.health.max(health);
        }
        sum
    }

    fn health_of(&self, key: &BlockKey) -> Health {
        self.devices[self.device(key)].health()
    }

    fn close(&mut self, within: Duration) {
        let until = std::time::Instant::now() + within;
        for device in &mut self.devices {
            device.close(until.saturating_duration_since(std::time::Instant::now()));
        }
    }
}
