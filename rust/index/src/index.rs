//! Holders, their lives, and what they are said to have.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::fmt;

use crate::changes::{self, CHANGE_BYTES, Change, DEVICE, DRAM, Malformed};
use crate::table::{Gone, Table};
use crate::{Key, Life, Slot, hash};

/// Holders that one index knows at once.
pub const MAX_HOLDERS: usize = 4095;
/// Lives at once: two for each holder, should all be dumped at once. Thirteen bits, and one number means "many".
const LIVES: usize = 8191;
/// Changes after which a page is swept: that costs less than they did.
const SWEEP_AFTER: usize = 4;
/// Changes ahead of which memory is asked for.
const AHEAD: usize = 16;

/// Why nothing was changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Error {
    /// The changes are none.
    Malformed(Malformed),
    /// There are [`MAX_HOLDERS`].
    Full,
    /// No dump of this holder has begun.
    NotBegun(String),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Malformed(malformed) => malformed.fmt(f),
            Self::Full => write!(f, "the index knows {MAX_HOLDERS} nodes: forget those that are gone"),
            Self::NotBegun(node) => write!(f, "no dump of '{node}' has begun"),
        }
    }
}

impl std::error::Error for Error {}

impl From<Malformed> for Error {
    fn from(malformed: Malformed) -> Self {
        Self::Malformed(malformed)
    }
}

/// Where a block stands in its prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The key before it.
    pub parent: Key,
    /// Its index.
    pub position: u32,
}

struct Holder {
    name: String,
    life: Life,
    staged: Option<Life>,
}

#[derive(Clone, Copy, Default)]
struct Record {
    slot: Slot,
    count: u64,
    xor: u128,
}

/// The index.
pub struct Index {
    pub(crate) table: Table,
    slots: HashMap<String, Slot>,
    holders: Vec<Option<Holder>>,
    free_slots: BinaryHeap<Reverse<Slot>>,
    records: Vec<Record>,
    free_lives: BinaryHeap<Reverse<Life>>,
    /// Bits of lives that are holders'.
    pub(crate) seen: Vec<u64>,
    /// Lives that entries may name although they are not seen.
    pub(crate) unseen: usize,
    /// Bits of lives that are being swept out: all pages before `cursor` know nothing of them.
    dying: Vec<u64>,
    cursor: usize,
    /// Those that come next.
    ended: Vec<Life>,
    debt: usize,
    epoch: u64,
}

impl Default for Index {
    fn default() -> Self {
        Self::new()
    }
}

impl Index {
    /// Knows nobody.
    pub fn new() -> Self {
        Self {
            table: Table::new(),
            slots: HashMap::new(),
            holders: Vec::new(),
            free_slots: BinaryHeap::new(),
            records: Vec::new(),
            free_lives: BinaryHeap::new(),
            seen: Vec::new(),
            unseen: 0,
            dying: Vec::new(),
            cursor: 0,
            ended: Vec::new(),
            debt: 0,
            epoch: 0,
        }
    }

    /// Another number whenever a holder has got or lost its slot.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Its row, if it is known.
    pub fn slot(&self, node: &str) -> Option<Slot> {
        self.slots.get(node).copied()
    }

    /// Whose row it is.
    pub fn name(&self, slot: Slot) -> Option<&str> {
        self.holders.get(slot)?.as_ref().map(|holder| &*holder.name)
    }

    /// Rows that are or have been somebody's.
    pub fn rows(&self) -> usize {
        self.holders.len()
    }

    /// Bytes that all of it occupies.
    pub fn bytes(&self) -> usize {
        self.table.bytes()
    }

    pub(crate) fn life(&self, node: &str) -> Option<Life> {
        Some(self.holders[self.slot(node)?].as_ref()?.life)
    }

    pub(crate) fn slot_of(&self, life: Life) -> Slot {
        self.records[usize::from(life)].slot
    }

    /// Blocks of the holder, once for each medium.
    pub fn count(&self, node: &str) -> u64 {
        self.life(node).map_or(0, |life| self.records[usize::from(life)].count)
    }

    /// XOR of its keys, rotated by medium.
    pub fn digest(&self, node: &str) -> Key {
        self.life(node).map_or(0, |life| self.records[usize::from(life)].xor).to_le_bytes()
    }

    /// What has come to it and gone from it.
    ///
    /// # Errors
    /// Malformed, or too many holders; nothing is changed.
    pub fn apply(&mut self, node: &str, packed: &[u8]) -> Result<(), Error> {
        let records = changes::check(packed)?;
        let slot = self.known(node)?;
        self.take_in(self.holder(slot).life, records);
        Ok(())
    }

    /// It has nothing, and nothing is staged.
    ///
    /// # Errors
    /// Too many holders.
    pub fn clear(&mut self, node: &str) -> Result<(), Error> {
        let slot = self.known(node)?;
        let life = self.holder(slot).life;
        if let Some(staged) = self.holder_mut(slot).staged.take() {
            self.end(staged);
        }
        if self.records[usize::from(life)].count > 0 {
            let next = self.begin_life(slot)?;
            self.holder_mut(slot).life = next;
            self.see(next, true);
            self.end(life);
        }
        Ok(())
    }

    /// It is not known any more.
    pub fn forget(&mut self, node: &str) {
        let Some(slot) = self.slots.remove(node) else { return };
        let holder = self.holders[slot].take().expect("a name's slot is a holder's");
        self.end(holder.life);
        if let Some(staged) = holder.staged {
            self.end(staged);
        }
        self.free_slots.push(Reverse(slot));
        self.epoch += 1;
    }

    /// It has what these leave.
    ///
    /// # Errors
    /// As `apply`.
    pub fn replace(&mut self, node: &str, packed: &[u8]) -> Result<(), Error> {
        changes::check(packed)?;
        self.begin(node)?;
        self.stage(node, packed)?;
        self.adopt(node)
    }

    /// A dump of it begins.
    ///
    /// # Errors
    /// Too many holders.
    pub fn begin(&mut self, node: &str) -> Result<(), Error> {
        let slot = self.known(node)?;
        if let Some(staged) = self.holder_mut(slot).staged.take() {
            self.end(staged);
        }
        let life = self.begin_life(slot)?;
        self.unseen += 1;
        self.holder_mut(slot).staged = Some(life);
        Ok(())
    }

    /// A part of it.
    ///
    /// # Errors
    /// Malformed, or not begun.
    pub fn stage(&mut self, node: &str, packed: &[u8]) -> Result<(), Error> {
        let records = changes::check(packed)?;
        let life = self.staged(node)?;
        self.take_in(life, records);
        Ok(())
    }

    /// It has what was staged.
    ///
    /// # Errors
    /// Not begun.
    pub fn adopt(&mut self, node: &str) -> Result<(), Error> {
        let life = self.staged(node)?;
        let slot = self.records[usize::from(life)].slot;
        let holder = self.holder_mut(slot);
        let old = std::mem::replace(&mut holder.life, life);
        holder.staged = None;
        self.unseen -= 1;
        self.see(life, true);
        self.end(old);
        Ok(())
    }

    /// All it has, by position, key and medium.
    pub fn dump(&self, node: &str) -> Vec<u8> {
        let Some(life) = self.life(node) else { return Vec::new() };
        let mut blocks = Vec::with_capacity(self.records[usize::from(life)].count as usize);
        for place in self.table.all() {
            let tiers = self.table.holders(place).tiers(life);
            let entry = self.table.entry(place);
            blocks.extend((0..3).filter(|tier| tiers >> tier & 1 == 1).map(|tier| Change {
                removed: false,
                tier,
                position: entry.position,
                key: entry.key,
                parent: entry.parent,
            }));
        }
        blocks.sort_unstable_by_key(|block| (block.position, block.key, block.tier));
        let mut packed = Vec::with_capacity(blocks.len() * CHANGE_BYTES);
        blocks.iter().for_each(|block| changes::push(&mut packed, block));
        packed
    }

    fn holder(&self, slot: Slot) -> &Holder {
        self.holders[slot].as_ref().expect("the slot is somebody's")
    }

    fn holder_mut(&mut self, slot: Slot) -> &mut Holder {
        self.holders[slot].as_mut().expect("the slot is somebody's")
    }

    fn known(&mut self, node: &str) -> Result<Slot, Error> {
        if let Some(slot) = self.slot(node) {
            return Ok(slot);
        }
        if self.slots.len() >= MAX_HOLDERS {
            return Err(Error::Full);
        }
        let slot = self.free_slots.pop().map_or(self.holders.len(), |Reverse(slot)| slot);
        let life = self.begin_life(slot)?;
        if slot == self.holders.len() {
            self.holders.push(None);
        }
        self.holders[slot] = Some(Holder { name: node.into(), life, staged: None });
        self.slots.insert(node.into(), slot);
        self.see(life, true);
        self.epoch += 1;
        Ok(slot)
    }

    fn staged(&self, node: &str) -> Result<Life, Error> {
        let holder = self.slot(node).map(|slot| self.holder(slot));
        holder.and_then(|holder| holder.staged).ok_or_else(|| Error::NotBegun(node.into()))
    }

    // -- lives -----------------------------------------------------------------------------------------------------

    /// A life that nobody has had, or that all entries have forgotten.
    fn begin_life(&mut self, slot: Slot) -> Result<Life, Error> {
        if self.free_lives.is_empty() && self.records.len() == LIVES {
            while self.sweep_one() {}
        }
        let life = match self.free_lives.pop() {
            Some(Reverse(life)) => life,
            None if self.records.len() < LIVES => {
                self.records.push(Record::default());
                let words = self.records.len().div_ceil(64);
                self.seen.resize(words, 0);
                self.dying.resize(words, 0);
                self.records.len() as Life - 1
            }
            None => return Err(Error::Full),
        };
        self.records[usize::from(life)] = Record { slot, ..Record::default() };
        Ok(life)
    }

    fn see(&mut self, life: Life, seen: bool) {
        let (word, bit) = (usize::from(life) / 64, 1 << (life % 64));
        if seen {
            self.seen[word] |= bit;
        } else {
            self.seen[word] &= !bit;
        }
    }

    /// The life is over, seen or staged.
    fn end(&mut self, life: Life) {
        let seen = self.seen[usize::from(life) / 64] >> (life % 64) & 1 == 1;
        self.see(life, false);
        if self.records[usize::from(life)].count == 0 {
            self.unseen -= usize::from(!seen);
            self.free_lives.push(Reverse(life));
            return;
        }
        self.unseen += usize::from(seen);
        self.ended.push(life);
        if self.cursor == 0 && self.dying.iter().all(|&bits| bits == 0) {
            self.begin_sweep();
        }
    }

    fn begin_sweep(&mut self) {
        for life in self.ended.drain(..) {
            self.dying[usize::from(life) / 64] |= 1 << (life % 64);
        }
        (self.cursor, self.debt) = (0, 0);
    }

    /// Sweeps a page; false: there is nothing to sweep.
    fn sweep_one(&mut self) -> bool {
        if self.dying.iter().all(|&bits| bits == 0) {
            return false;
        }
        if self.cursor < self.table.pages() {
            self.table.sweep(self.cursor, &self.dying);
            self.cursor += 1;
        }
        if self.cursor >= self.table.pages() {
            for life in 0..self.records.len() {
                if self.dying[life / 64] >> (life % 64) & 1 == 1 {
                    self.free_lives.push(Reverse(life as Life));
                    self.unseen -= 1;
                }
            }
            self.dying.fill(0);
            self.begin_sweep();
        }
        true
    }

    /// Lets a few pages be swept, as there were so many changes.
    fn sweep(&mut self, changes: usize) {
        if self.unseen == 0 || self.dying.iter().all(|&bits| bits == 0) {
            return;
        }
        self.debt += changes;
        while self.debt >= SWEEP_AFTER {
            self.debt -= SWEEP_AFTER;
            if !self.sweep_one() {
                return;
            }
        }
    }

    // -- changes ---------------------------------------------------------------------------------------------------

    fn take_in(&mut self, life: Life, records: &[[u8; CHANGE_BYTES]]) {
        let mut hashes = [0; AHEAD];
        let mut last = None;
        for at in 0..records.len() + AHEAD {
            if at >= AHEAD {
                last = self.change(life, &changes::read(&records[at - AHEAD]), hashes[at % AHEAD], last);
            }
            if let Some(record) = records.get(at) {
                let hash = hash(changes::key(record));
                hashes[at % AHEAD] = hash;
                self.table.prefetch(hash);
            }
        }
        self.sweep(records.len());
    }

    /// last: where the block of the change before is. Returns where this one's is.
    fn change(&mut self, life: Life, change: &Change, hash: u64, last: Option<usize>) -> Option<usize> {
        let (lives, table) = (self.records.len(), &mut self.table);
        let behind = last.and_then(|last| table.behind(last, &change.key));
        let mut known = behind.or_else(|| table.find(&change.key, hash));
        let changed = match (known, change.removed) {
            (None, true) => false,
            (None, false) => {
                known = Some(table.insert(change, hash, life, last));
                true
            }
            (Some(place), false) => table.add(place, life, change.tier, lives),
            (Some(place), true) => match table.drop_from(place, life, change.tier) {
                Gone::Not => false,
                Gone::One => true,
                Gone::Last => {
                    table.remove(place, hash);
                    // The next one may stand behind it, but if the table is a new one.
                    known = known.filter(|_| table.pages() > 0);
                    true
                }
            },
        };
        if changed {
            let record = &mut self.records[usize::from(life)];
            record.xor ^= digest(&change.key, change.tier);
            record.count = if change.removed { record.count - 1 } else { record.count + 1 };
        }
        known
    }

    /// Panics if it contradicts itself.
    pub fn check(&self) {
        let mut counted = vec![Record::default(); self.records.len()];
        for (place, listed) in self.table.check() {
            for (life, tiers) in listed {
                let record = &mut counted[usize::from(life)];
                for tier in (0..3).filter(|tier| tiers >> tier & 1 == 1) {
                    record.count += 1;
                    record.xor ^= digest(&self.table.entry(place).key, tier);
                }
            }
        }
        let mut alive = 0;
        for (slot, holder) in self.holders.iter().enumerate() {
            let Some(holder) = holder else { continue };
            assert_eq!(self.slot(&holder.name), Some(slot), "a name has another's slot");
            for life in std::iter::once(holder.life).chain(holder.staged) {
                let (record, counted) = (&self.records[usize::from(life)], &counted[usize::from(life)]);
                assert_eq!(record.slot, slot, "a life is another's");
                assert_eq!((record.count, record.xor), (counted.count, counted.xor), "count or XOR is wrong");
                let seen = self.seen[usize::from(life) / 64] >> (life % 64) & 1 == 1;
                assert_eq!(seen, life == holder.life, "what is staged is seen, or what is not is not");
                alive += 1;
            }
        }
        let staged = self.holders.iter().flatten().filter(|holder| holder.staged.is_some()).count();
        let dying = self.dying.iter().map(|bits| bits.count_ones() as usize).sum::<usize>() + self.ended.len();
        assert_eq!(self.unseen, staged + dying, "the number of lives that are not seen is wrong");
        assert_eq!(alive + dying + self.free_lives.len(), self.records.len(), "a life is lost");
        for Reverse(life) in &self.free_lives {
            assert_eq!(counted[usize::from(*life)].count, 0, "a block names a life that is free");
        }
    }
}

/// A block's part in the digest: `DaemonReport::Heartbeat` has the rule. On a device it is rotated by two bytes.
fn digest(key: &Key, tier: u8) -> u128 {
    let bytes = match tier {
        DRAM => 0,
        DEVICE => 2,
        _ => 1,
    };
    u128::from_le_bytes(*key).rotate_right(8 * bytes)
}
