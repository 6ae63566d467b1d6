//! One part of the table of blocks: open addressing over entries of 48 bytes that name their holders in place.
//!
//! ```text
//!  tags     [u8; C]     0: free; else a bit and seven bits of the hash: one line of cache says where to look
//!  entries  [Entry; C]  key 16 | parent 16 | position 4 | cells 6 x 2
//!  cells    up to six holders, (life << 3 | tiers) each, packed to the left, 0: none
//!           or WIDE, the number (two cells) of a set of bits, how many holders
//! ```
//!
//! At most 85 % are taken, and it grows by half: 49 bytes a place are 58 to 87 for a block, of however few holders.
//! A key's home is its hash times the capacity: a larger table has the entries in the same order, so that to grow is to
//! read one and write the other from one end to the other.

use crate::changes::TIERS;
use crate::{Key, Life};

/// Where a block stands, and who has it.
#[derive(Clone, Copy, Default)]
pub(crate) struct Entry {
    pub(crate) key: Key,
    pub(crate) parent: Key,
    pub(crate) position: u32,
    cells: Cells,
}

/// Holders in place.
pub(crate) type Cells = [u16; INLINE];

const INLINE: usize = 6;
/// The first cell of an entry whose holders are bits elsewhere. No life and tiers are this: `LIVES` is one less.
const WIDE: u16 = u16::MAX;
/// Holders so few go back into the entry: fewer than made it wide, or one that comes and goes would move them each time.
const NARROW: u16 = 4;
/// A table of so many is the smallest.
const SMALLEST: usize = 8;

/// Who has a block: as the entry or the bits beside it say.
#[derive(Clone, Copy)]
pub(crate) enum Holders<'a> {
    /// (life << 3 | tiers), up to the first 0.
    Few(&'a Cells),
    /// Bits of lives: as many words for each tier.
    Many(&'a [u64]),
}

impl Holders<'_> {
    /// On which tiers this life has it, as bits.
    pub(crate) fn tiers(self, life: Life) -> u8 {
        match self {
            Self::Few(cells) => {
                cells.iter().find(|&&cell| cell >> 3 == life && cell != 0).map_or(0, |&cell| cell as u8 & 7)
            }
            Self::Many(bits) => {
                let (words, word, bit) = (bits.len() / TIERS, usize::from(life) / 64, life % 64);
                if word >= words {
                    return 0;
                }
                (0..TIERS).map(|tier| ((bits[tier * words + word] >> bit & 1) as u8) << tier).sum()
            }
        }
    }

    /// Adds to `mask` the bits of all lives that have it on any of these tiers.
    pub(crate) fn mark(self, tiers: u8, mask: &mut [u64]) {
        match self {
            Self::Few(cells) => {
                for cell in cells.iter().take_while(|&&cell| cell != 0).filter(|&&cell| cell as u8 & tiers & 7 != 0) {
                    let life = usize::from(cell >> 3);
                    mask[life / 64] |= 1 << (life % 64);
                }
            }
            Self::Many(bits) => {
                for (tier, words) in bits.chunks_exact(bits.len() / TIERS).enumerate() {
                    if tiers >> tier & 1 == 1 {
                        mask.iter_mut().zip(words).for_each(|(mask, word)| *mask |= word);
                    }
                }
            }
        }
    }
}

#[derive(Default)]
pub(crate) struct Table {
    tags: Box<[u8]>,
    entries: Box<[Entry]>,
    len: usize,
    wide: Vec<Box<[u64]>>,
    unused: Vec<u32>,
}

/// What is left of an entry after a holder has gone.
#[derive(PartialEq, Eq)]
pub(crate) enum Gone {
    /// It was not there.
    Not,
    /// Others have it, or it has it elsewhere.
    One,
    /// That was the last.
    Last,
}

fn tag(hash: u64) -> u8 {
    hash as u8 | 0x80
}

impl Table {
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn places(&self) -> usize {
        self.tags.len()
    }

    /// Bytes that it occupies.
    pub(crate) fn bytes(&self) -> usize {
        // An allocation costs about sixteen bytes more than it holds.
        self.places() * (1 + size_of::<Entry>())
            + self.wide.capacity() * size_of::<Box<[u64]>>()
            + self.wide.iter().map(|bits| bits.len() * 8 + 16).sum::<usize>()
            + self.unused.capacity() * 4
    }

    fn home(&self, hash: u64) -> usize {
        ((hash >> 22 & 0xFFFF_FFFF) * self.places() as u64 >> 32) as usize
    }

    fn next(&self, place: usize) -> usize {
        if place + 1 == self.places() { 0 } else { place + 1 }
    }

    /// Brings the tags into the cache.
    pub(crate) fn prefetch(&self, hash: u64) {
        if !self.tags.is_empty() {
            prefetch(&self.tags[self.home(hash)]);
        }
    }

    /// Brings the entry into the cache, most likely, given its tags.
    pub(crate) fn prefetch_entry(&self, hash: u64) {
        if self.tags.is_empty() {
            return;
        }
        let mut place = self.home(hash);
        while self.tags[place] != 0 {
            if self.tags[place] == tag(hash) {
                prefetch(&self.entries[place].key);
                prefetch(&self.entries[place].cells);
                return;
            }
            place = self.next(place);
        }
        // It will be put here.
        prefetch(&self.entries[place].key);
    }

    pub(crate) fn find(&self, key: &Key, hash: u64) -> Option<usize> {
        if self.tags.is_empty() {
            return None;
        }
        let mut place = self.home(hash);
        loop {
            match self.tags[place] {
                0 => return None,
                found if found == tag(hash) && self.entries[place].key == *key => return Some(place),
                _ => place = self.next(place),
            }
        }
    }

    pub(crate) fn entry(&self, place: usize) -> &Entry {
        &self.entries[place]
    }

    pub(crate) fn holders(&self, place: usize) -> Holders<'_> {
        let cells = &self.entries[place].cells;
        if cells[0] == WIDE { Holders::Many(&self.wide[number(cells)]) } else { Holders::Few(cells) }
    }

    /// All entries, in the order of their places.
    pub(crate) fn all(&self) -> impl Iterator<Item = usize> {
        (0..self.places()).filter(|&place| self.tags[place] != 0)
    }

    /// Adds an entry that is not there.
    pub(crate) fn insert(&mut self, key: Key, parent: Key, position: u32, hash: u64, life: Life, tier: u8) {
        if (self.len + 1) * 20 > self.places() * 17 {
            self.resize((self.places() * 3 / 2).max(SMALLEST));
        }
        let mut cells = Cells::default();
        cells[0] = life << 3 | 1 << tier;
        self.put(Entry { key, parent, position, cells }, hash);
        self.len += 1;
    }

    fn put(&mut self, entry: Entry, hash: u64) {
        let mut place = self.home(hash);
        while self.tags[place] != 0 {
            place = self.next(place);
        }
        self.tags[place] = tag(hash);
        self.entries[place] = entry;
    }

    fn resize(&mut self, places: usize) {
        let tags = std::mem::replace(&mut self.tags, vec![0; places].into());
        let entries = std::mem::replace(&mut self.entries, vec![Entry::default(); places].into());
        for (entry, _) in entries.iter().zip(tags).filter(|(_, tag)| *tag != 0) {
            self.put(*entry, crate::hash(&entry.key));
        }
    }

    /// Removes an entry that nobody has.
    pub(crate) fn remove(&mut self, place: usize) {
        let (mut hole, mut place) = (place, place);
        self.len -= 1;
        loop {
            place = self.next(place);
            if self.tags[place] == 0 || place == hole {
                break;
            }
            // Whoever would be found no more, with a hole between its home and its place, moves into it.
            let away = |from: usize| (place + self.places() - from) % self.places();
            if away(self.home(crate::hash(&self.entries[place].key))) >= away(hole) {
                self.tags[hole] = self.tags[place];
                self.entries[hole] = self.entries[place];
                hole = place;
            }
        }
        self.tags[hole] = 0;
        self.shrink();
    }

    fn shrink(&mut self) {
        if self.len == 0 {
            (self.tags, self.entries) = (Box::default(), Box::default());
            (self.wide, self.unused) = (Vec::new(), Vec::new());
        } else if self.places() > SMALLEST && self.len * 4 < self.places() {
            self.resize((self.len * 3 / 2).max(SMALLEST));
        }
    }

    /// The life has it there; false: that is known. lives: of all.
    pub(crate) fn add(&mut self, place: usize, life: Life, tier: u8, lives: usize) -> bool {
        let cells = &mut self.entries[place].cells;
        if cells[0] == WIDE {
            let bits = &mut self.wide[number(cells)];
            let (word, bit) = (usize::from(life) / 64, 1 << (life % 64));
            if word >= bits.len() / TIERS {
                *bits = widened(bits, lives);
            }
            let words = bits.len() / TIERS;
            let new = (0..TIERS).all(|tier| bits[tier * words + word] & bit == 0);
            let known = bits[usize::from(tier) * words + word] & bit != 0;
            bits[usize::from(tier) * words + word] |= bit;
            cells[3] += u16::from(new);
            return !known;
        }
        for cell in cells.iter_mut() {
            if *cell == 0 {
                *cell = life << 3 | 1 << tier;
                return true;
            }
            if *cell >> 3 == life {
                let known = *cell >> tier & 1 == 1;
                *cell |= 1 << tier;
                return !known;
            }
        }
        self.widen(place, lives);
        self.add(place, life, tier, lives)
    }

    fn widen(&mut self, place: usize, lives: usize) {
        let cells = self.entries[place].cells;
        let words = lives.div_ceil(64);
        let mut bits: Box<[u64]> = vec![0; TIERS * words].into();
        for cell in cells {
            let life = usize::from(cell >> 3);
            (0..TIERS)
                .filter(|tier| cell >> tier & 1 == 1)
                .for_each(|tier| bits[tier * words + life / 64] |= 1 << (life % 64));
        }
        let number = match self.unused.pop() {
            Some(number) => {
                self.wide[number as usize] = bits;
                number
            }
            None => {
                self.wide.push(bits);
                self.wide.len() as u32 - 1
            }
        };
        self.entries[place].cells = [WIDE, number as u16, (number >> 16) as u16, INLINE as u16, 0, 0];
    }

    /// The life has it there no more.
    pub(crate) fn drop_from(&mut self, place: usize, life: Life, tier: u8) -> Gone {
        let cells = &mut self.entries[place].cells;
        if cells[0] == WIDE {
            let bits = &mut self.wide[number(cells)];
            let (words, word, bit) = (bits.len() / TIERS, usize::from(life) / 64, 1 << (life % 64));
            if word >= words || bits[usize::from(tier) * words + word] & bit == 0 {
                return Gone::Not;
            }
            bits[usize::from(tier) * words + word] &= !bit;
            if (0..TIERS).all(|tier| bits[tier * words + word] & bit == 0) {
                cells[3] -= 1;
                self.narrow(place);
            }
            return Gone::One;
        }
        let Some(at) = cells.iter().position(|&cell| cell != 0 && cell >> 3 == life) else { return Gone::Not };
        if cells[at] >> tier & 1 == 0 {
            return Gone::Not;
        }
        if cells[at] & 7 == 1 << tier {
            close(cells, at);
        } else {
            cells[at] &= !(1 << tier);
        }
        if cells[0] == 0 { Gone::Last } else { Gone::One }
    }

    fn narrow(&mut self, place: usize) {
        let cells = self.entries[place].cells;
        if cells[3] > NARROW {
            return;
        }
        let number = number(&cells);
        let bits = std::mem::take(&mut self.wide[number]);
        self.unused.push(number as u32);
        self.entries[place].cells = narrowed(&bits);
    }

    /// All that these lives have is gone.
    pub(crate) fn sweep(&mut self, dying: &[u64]) {
        let mut empty = 0;
        for place in 0..self.places() {
            if self.tags[place] == 0 {
                continue;
            }
            let cells = &mut self.entries[place].cells;
            if cells[0] == WIDE {
                let bits = &mut self.wide[number(cells)];
                let words = bits.len() / TIERS;
                for (at, word) in bits.iter_mut().enumerate() {
                    *word &= !dying[at % words];
                }
                cells[3] = (0..words)
                    .map(|word| (0..TIERS).fold(0, |all, tier| all | bits[tier * words + word]).count_ones() as u16)
                    .sum();
                self.narrow(place);
            } else {
                for at in (0..INLINE).rev() {
                    let life = usize::from(cells[at] >> 3);
                    if cells[at] != 0 && dying[life / 64] >> (life % 64) & 1 == 1 {
                        close(cells, at);
                    }
                }
            }
            if self.entries[place].cells[0] == 0 {
                // No entry's place depends on it before all are put anew.
                empty += 1;
                self.tags[place] = 0;
            }
        }
        if empty > 0 {
            self.len -= empty;
            let places = if self.len * 2 < self.places() { (self.len * 3 / 2).max(SMALLEST) } else { self.places() };
            self.resize(places);
            self.shrink();
        }
    }

    /// Panics if it contradicts itself. Returns each entry's place, lives and tiers.
    pub(crate) fn check(&self) -> Vec<(usize, Vec<(Life, u8)>)> {
        let entries: Vec<_> = self.all().map(|place| (place, self.listed(place))).collect();
        assert_eq!(entries.len(), self.len, "the number of entries is wrong");
        assert!(self.len * 20 <= self.places() * 17, "the table is too full");
        let mut wide = 0;
        for (place, listed) in &entries {
            let entry = &self.entries[*place];
            assert_eq!(self.find(&entry.key, crate::hash(&entry.key)), Some(*place), "an entry is not found");
            assert!(!listed.is_empty(), "a block is held by nobody");
            if entry.cells[0] == WIDE {
                wide += 1;
                assert_eq!(usize::from(entry.cells[3]), listed.len(), "the number of holders is wrong");
                assert!(entry.cells[3] > NARROW, "it has few holders");
            } else {
                let few = entry.cells.iter().take_while(|&&cell| cell != 0).count();
                assert!(entry.cells[few..].iter().all(|&cell| cell == 0), "a hole among the holders");
            }
        }
        assert_eq!(wide + self.unused.len(), self.wide.len(), "a set of bits is lost");
        entries
    }

    /// Lives and tiers of an entry, in the order of lives.
    fn listed(&self, place: usize) -> Vec<(Life, u8)> {
        let mut listed: Vec<_> = match self.holders(place) {
            Holders::Few(cells) => {
                cells.iter().filter(|&&cell| cell != 0).map(|&cell| (cell >> 3, cell as u8 & 7)).collect()
            }
            many @ Holders::Many(bits) => {
                let lives = bits.len() / TIERS * 64;
                let tiers = (0..lives as Life).map(|life| (life, many.tiers(life)));
                tiers.filter(|&(_, tiers)| tiers != 0).collect()
            }
        };
        listed.sort_unstable();
        listed
    }
}

fn number(cells: &Cells) -> usize {
    usize::from(cells[1]) | usize::from(cells[2]) << 16
}

/// Takes out one that is there; the last takes its place.
fn close(cells: &mut Cells, at: usize) {
    let last = cells.iter().rposition(|&cell| cell != 0).unwrap_or(at);
    cells[at] = cells[last];
    cells[last] = 0;
}

fn widened(bits: &[u64], lives: usize) -> Box<[u64]> {
    let words = lives.div_ceil(64);
    let mut wider: Box<[u64]> = vec![0; TIERS * words].into();
    for (wider, old) in wider.chunks_exact_mut(words).zip(bits.chunks_exact(bits.len() / TIERS)) {
        wider[..old.len()].copy_from_slice(old);
    }
    wider
}

fn narrowed(bits: &[u64]) -> Cells {
    let (mut cells, mut count, words) = (Cells::default(), 0, bits.len() / TIERS);
    for word in 0..words {
        let mut left = (0..TIERS).fold(0, |all, tier| all | bits[tier * words + word]);
        while left != 0 {
            let life = (word * 64) as u16 + left.trailing_zeros() as u16;
            cells[count] = life << 3 | u16::from(Holders::Many(bits).tiers(life));
            count += 1;
            left &= left - 1;
        }
    }
    cells
}

/// A hint to the processor.
fn prefetch<T>(what: &T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: it reads nothing, whatever the address; SSE is part of x86-64.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(what).cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = what;
}
