//! The table of blocks: entries that name their holders in place, and numbers that find them by key.
//!
//! ```text
//!  entry  key 16 | parent 16 | position 4 | cells 6 x 2
//!  cells  up to six holders, (life << 3 | tiers) each, packed to the left, 0: none; an entry without any is free
//!         or WIDE, the number (two cells) of a set of bits, how many holders
//!  finder by 32 bits of the hash: these | the entry's place + 1, 8 bytes; open addressing, in parts that grow alone
//! ```
//!
//! What comes together lies together: a new entry is put behind the one before it, so that a prefix is read from one end
//! to the other without being sought, which is what memory is fast at. An entry that is not where it is expected is found
//! by its hash. Entries lie in pages of 64; a page of which a quarter is free again is filled before a new one is begun.
//! A block of few holders costs 48 bytes and 11 to 22 for its finder, a third more if pages are as empty as they get.

use crate::changes::{Change, TIERS};
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
/// A finder of so many is the smallest.
const SMALLEST: usize = 8;
/// Entries of a page: bits of a word say which are taken.
pub(crate) const PAGE: usize = 64;
/// Free entries that make a page worth filling.
const SPARE: u32 = 16;
/// Entries that are allocated at once.
const CHUNK: usize = 8192;
/// Parts of the finder: at ten million blocks, one that grows moves a third of a megabyte.
const PARTS_BITS: u32 = 8;

/// Who has a block: as the entry or the bits beside it say.
#[derive(Clone, Copy, PartialEq, Eq)]
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
    finder: Vec<Part>,
    chunks: Vec<Box<[Entry]>>,
    /// By page: which entries are taken.
    taken: Vec<u64>,
    /// Pages with room, and whether a page is among them.
    spare: Vec<u32>,
    listed: Vec<bool>,
    /// The page that is being filled.
    open: usize,
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

impl Table {
    pub(crate) fn new() -> Self {
        Self { finder: (0..1 << PARTS_BITS).map(|_| Part::default()).collect(), ..Self::default() }
    }

    /// Bytes that it occupies.
    pub(crate) fn bytes(&self) -> usize {
        // An allocation costs about sixteen bytes more than it holds.
        self.chunks.len() * (CHUNK * size_of::<Entry>() + 16)
            + self.finder.iter().map(|part| size_of::<Part>() + part.slots.len() * 8).sum::<usize>()
            + self.taken.capacity() * 8
            + self.listed.capacity()
            + self.spare.capacity() * 4
            + self.wide.capacity() * size_of::<Box<[u64]>>()
            + self.wide.iter().map(|bits| bits.len() * 8 + 16).sum::<usize>()
            + self.unused.capacity() * 4
    }

    /// Pages there are.
    pub(crate) fn pages(&self) -> usize {
        self.taken.len()
    }

    fn part(&self, hash: u64) -> &Part {
        &self.finder[(hash >> (64 - PARTS_BITS)) as usize]
    }

    fn part_mut(&mut self, hash: u64) -> &mut Part {
        &mut self.finder[(hash >> (64 - PARTS_BITS)) as usize]
    }

    /// Brings what finds the key into the cache.
    pub(crate) fn prefetch(&self, hash: u64) {
        self.part(hash).prefetch(hash);
    }

    pub(crate) fn entry(&self, place: usize) -> &Entry {
        &self.chunks[place / CHUNK][place % CHUNK]
    }

    fn entry_mut(&mut self, place: usize) -> &mut Entry {
        &mut self.chunks[place / CHUNK][place % CHUNK]
    }

    fn cells_mut(&mut self, place: usize) -> &mut Cells {
        &mut self.entry_mut(place).cells
    }

    /// Whether the key stands behind this place, as it does if both came together.
    pub(crate) fn behind(&self, place: usize, key: &Key) -> Option<usize> {
        let next = place + 1;
        let entry = self.chunks.get(next / CHUNK)?.get(next % CHUNK)?;
        (entry.key == *key && entry.cells[0] != 0).then_some(next)
    }

    pub(crate) fn find(&self, key: &Key, hash: u64) -> Option<usize> {
        self.part(hash).find(hash, |place| self.entry(place).key == *key)
    }

    pub(crate) fn holders(&self, place: usize) -> Holders<'_> {
        let cells = &self.entry(place).cells;
        if cells[0] == WIDE { Holders::Many(&self.wide[number(cells)]) } else { Holders::Few(cells) }
    }

    /// All entries, in the order of their places.
    pub(crate) fn all(&self) -> impl Iterator<Item = usize> {
        self.taken.iter().enumerate().flat_map(|(page, &taken)| places(page, taken))
    }

    /// Adds an entry that is not there, behind this one if it can be. Returns its place.
    pub(crate) fn insert(&mut self, change: &Change, hash: u64, life: Life, behind: Option<usize>) -> usize {
        let place = self.take(behind);
        let mut cells = Cells::default();
        cells[0] = life << 3 | 1 << change.tier;
        let Change { key, parent, position, .. } = *change;
        *self.entry_mut(place) = Entry { key, parent, position, cells };
        self.part_mut(hash).insert(hash, place);
        self.len += 1;
        place
    }

    fn take(&mut self, behind: Option<usize>) -> usize {
        let next = behind.map(|place| place + 1);
        let place = match next
            .filter(|next| self.taken.get(next / PAGE).is_some_and(|taken| taken >> (next % PAGE) & 1 == 0))
        {
            Some(next) => next,
            None => {
                if self.taken.get(self.open).is_none_or(|&taken| taken == u64::MAX) {
                    self.open = self.turn();
                }
                self.open * PAGE + self.taken[self.open].trailing_ones() as usize
            }
        };
        self.taken[place / PAGE] |= 1 << (place % PAGE);
        place
    }

    /// The next page to fill.
    fn turn(&mut self) -> usize {
        while let Some(page) = self.spare.pop() {
            let page = page as usize;
            self.listed[page] = false;
            if self.taken[page].count_zeros() >= SPARE {
                return page;
            }
        }
        if self.taken.len() * PAGE == self.chunks.len() * CHUNK {
            self.chunks.push(vec![Entry::default(); CHUNK].into());
        }
        self.taken.push(0);
        self.listed.push(false);
        self.taken.len() - 1
    }

    /// Removes an entry that nobody has.
    pub(crate) fn remove(&mut self, place: usize, hash: u64) {
        self.part_mut(hash).remove(hash, place);
        *self.entry_mut(place) = Entry::default();
        self.len -= 1;
        if self.len == 0 {
            *self = Self::new();
            return;
        }
        let page = place / PAGE;
        self.taken[page] &= !(1 << (place % PAGE));
        if self.taken[page].count_zeros() >= SPARE && page != self.open && !self.listed[page] {
            self.listed[page] = true;
            self.spare.push(page as u32);
        }
    }

    /// The life has it there; false: that is known. lives: of all.
    pub(crate) fn add(&mut self, place: usize, life: Life, tier: u8, lives: usize) -> bool {
        let cells = &mut self.chunks[place / CHUNK][place % CHUNK].cells;
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
        let cells = self.entry(place).cells;
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
        *self.cells_mut(place) = [WIDE, number as u16, (number >> 16) as u16, INLINE as u16, 0, 0];
    }

    /// The life has it there no more.
    pub(crate) fn drop_from(&mut self, place: usize, life: Life, tier: u8) -> Gone {
        let cells = &mut self.chunks[place / CHUNK][place % CHUNK].cells;
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
        let cells = self.entry(place).cells;
        if cells[3] > NARROW {
            return;
        }
        let number = number(&cells);
        let bits = std::mem::take(&mut self.wide[number]);
        self.unused.push(number as u32);
        *self.cells_mut(place) = narrowed(&bits);
    }

    /// All that these lives have on this page is gone.
    pub(crate) fn sweep(&mut self, page: usize, dying: &[u64]) {
        for place in places(page, self.taken[page]) {
            let cells = &mut self.chunks[place / CHUNK][place % CHUNK].cells;
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
            let entry = self.entry(place);
            if entry.cells[0] == 0 {
                self.remove(place, crate::hash(&entry.key));
            }
        }
    }

    /// Panics if it contradicts itself. Returns each entry's place, lives and tiers.
    pub(crate) fn check(&self) -> Vec<(usize, Vec<(Life, u8)>)> {
        let entries: Vec<_> = self.all().map(|place| (place, self.listed(place))).collect();
        assert_eq!(entries.len(), self.len, "the number of entries is wrong");
        assert_eq!(self.finder.iter().map(|part| part.len).sum::<usize>(), self.len, "the finder has another number");
        let mut wide = 0;
        for (place, listed) in &entries {
            let entry = self.entry(*place);
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
        for (page, taken) in self.taken.iter().enumerate() {
            assert!(taken.count_zeros() < SPARE || page == self.open || self.listed[page], "a page with room is lost");
            let free = |place: usize| self.entry(place).cells[0] == 0;
            assert!(places(page, !taken).all(free), "an entry that is free is held");
        }
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

/// One part of the finder: 32 bits of the hash, then the place and 1; 0: free.
#[derive(Default)]
struct Part {
    slots: Box<[u64]>,
    len: usize,
}

impl Part {
    /// A home is the hash times the capacity: a larger part has all in the same order, and to grow is to read one and
    /// write the other from end to end.
    fn home(&self, bits: u64) -> usize {
        ((bits * self.slots.len() as u64) >> 32) as usize
    }

    fn next(&self, at: usize) -> usize {
        if at + 1 == self.slots.len() { 0 } else { at + 1 }
    }

    fn prefetch(&self, hash: u64) {
        if let Some(slot) = self.slots.get(self.home(short(hash))) {
            prefetch(slot);
        }
    }

    fn find(&self, hash: u64, is: impl Fn(usize) -> bool) -> Option<usize> {
        let mut at = self.home(short(hash));
        loop {
            let slot = *self.slots.get(at)?;
            if slot == 0 {
                return None;
            }
            if slot >> 32 == short(hash) && is(place(slot)) {
                return Some(place(slot));
            }
            at = self.next(at);
        }
    }

    fn insert(&mut self, hash: u64, place: usize) {
        if (self.len + 1) * 4 > self.slots.len() * 3 {
            self.resize((self.slots.len() * 2).max(SMALLEST));
        }
        self.put(short(hash) << 32 | (place as u64 + 1));
        self.len += 1;
    }

    fn put(&mut self, slot: u64) {
        let mut at = self.home(slot >> 32);
        while self.slots[at] != 0 {
            at = self.next(at);
        }
        self.slots[at] = slot;
    }

    fn resize(&mut self, size: usize) {
        let slots = std::mem::replace(&mut self.slots, vec![0; size].into());
        slots.into_iter().filter(|&slot| slot != 0).for_each(|slot| self.put(slot));
    }

    /// It is there.
    fn remove(&mut self, hash: u64, place: usize) {
        let wanted = short(hash) << 32 | (place as u64 + 1);
        let mut hole = self.home(short(hash));
        while self.slots[hole] != wanted {
            hole = self.next(hole);
        }
        let mut at = hole;
        loop {
            at = self.next(at);
            if self.slots[at] == 0 {
                break;
            }
            // Whoever would be found no more, with a hole between its home and where it is, moves into it.
            let away = |from: usize| (at + self.slots.len() - from) % self.slots.len();
            if away(self.home(self.slots[at] >> 32)) >= away(hole) {
                self.slots[hole] = self.slots[at];
                hole = at;
            }
        }
        self.slots[hole] = 0;
        self.len -= 1;
        if self.slots.len() > SMALLEST && self.len * 4 < self.slots.len() {
            self.resize((self.len * 8 / 5).max(SMALLEST));
        }
    }
}

/// The bits of a hash by which a part finds.
fn short(hash: u64) -> u64 {
    hash >> 16 & 0xFFFF_FFFF
}

fn place(slot: u64) -> usize {
    (slot & 0xFFFF_FFFF) as usize - 1
}

/// The places of a page whose bits are set.
fn places(page: usize, mut bits: u64) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        (bits != 0).then(|| {
            let place = page * PAGE + bits.trailing_zeros() as usize;
            bits &= bits - 1;
            place
        })
    })
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
