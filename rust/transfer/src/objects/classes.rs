//! How an object lies in blocks.
//!
//! An object whose value has at most [`CHUNK`] bytes is one block of the smallest class that holds it; a larger one is a
//! chain of blocks of the largest class with `CHUNK` bytes of the value each, the last one with the rest. The first
//! block is the object's **head**, and its key is made from the name; the others are found through it.
//!
//! ```text
//! offset             bytes      what
//! 0                  value      the value, or this block's part of it; page aligned
//! ...                           zeros
//! block - 48 - name  name       the name (the head only)
//! block - 48         8          magic
//! block - 40         8          bytes of the whole value, u64
//! block - 32         16         drawn for this put: keys of the other blocks are made from it, so that blocks of two
//!                               values of one name never meet
//! block - 16         4          version, u32
//! block - 12         4          which block of the value, u32
//! block - 8          4          bytes of the name, u32
//! block - 4          4          CRC-32C of all from the name to here, so that a view need not read the whole strip to
//!                               know where the value ends
//! ```
//!
//! All numbers are little-endian. A class takes a page more than a power of two, so that a value of a power of two wastes
//! little, and a page is the least that memory moves by anyway; 4 KiB is the exception.

use crate::error::Error;
use crate::memory::{Arena, checksum};
use crate::types::{Layout, SlotRef};

/// Most bytes of a value in one block.
pub const CHUNK: u64 = 1 << 20;
/// Longest name, in bytes.
pub const NAME_LIMIT: usize = 1024;
/// Largest value: block numbers have 32 bits, and nobody's pool is near it.
pub const VALUE_LIMIT: u64 = CHUNK << 31;

const MAGIC: [u8; 8] = *b"pyobject";
const VERSION: u32 = 1;
const FOOTER: usize = 48;
const PAGE: u64 = 4096;
/// Bytes of a strip are about these: a piece that stays in the second cache between its checksum and its copy.
const STRIP: u64 = 64 << 10;

/// A size of block. The number is what clients and daemon say to each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Class(u8);

impl Class {
    /// How many there are: 4 KiB, then 4 KiB + 4 KiB, 8 KiB + 4 KiB, ... 1 MiB + 4 KiB.
    pub const COUNT: u8 = 10;
    /// For blocks of values of more than one.
    pub const LARGEST: Self = Self(Self::COUNT - 1);

    /// The class of this number.
    pub fn new(number: u8) -> Option<Self> {
        (number < Self::COUNT).then_some(Self(number))
    }

    /// All of them, the smallest first.
    pub fn all() -> impl Iterator<Item = Self> {
        (0..Self::COUNT).map(Self)
    }

    /// Its number.
    pub fn number(self) -> u8 {
        self.0
    }

    /// The smallest class for a value and a name of so many bytes.
    pub fn fitting(value: u64, name: usize) -> Self {
        let fits = |class: &Self| value + (name + FOOTER) as u64 <= class.layout().block_bytes() as u64;
        Self::all().find(|class| value <= CHUNK && fits(class)).unwrap_or(Self::LARGEST)
    }

    /// How its blocks are cut into strips.
    pub fn layout(self) -> Layout {
        let value = if self.0 == 0 { 0 } else { PAGE << (self.0 - 1) };
        let strips = (value / STRIP).max(1);
        Layout { strips: strips as u32, strip_bytes: ((value + PAGE) / strips) as u32 }
    }

    /// The class of a layout, if it is one of objects.
    pub fn of(layout: Layout) -> Option<Self> {
        Self::all().find(|class| class.layout() == layout)
    }
}

/// What stands behind the value in a block of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trailer<'a> {
    /// Bytes of the whole value.
    pub value: u64,
    /// Drawn for this put.
    pub nonce: [u8; 16],
    /// Which block of the value.
    pub index: u32,
    /// Empty in all blocks but the head.
    pub name: &'a [u8],
}

impl<'a> Trailer<'a> {
    /// How many blocks the value takes.
    pub fn blocks(&self) -> u32 {
        blocks(self.value)
    }

    /// Bytes of the value in this block.
    pub fn part(&self) -> usize {
        let before = u64::from(self.index) * CHUNK;
        (self.value.saturating_sub(before)).min(CHUNK) as usize
    }

    /// The end of a block.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.name.len() + FOOTER);
        bytes.extend(self.name);
        bytes.extend(MAGIC);
        bytes.extend(self.value.to_le_bytes());
        bytes.extend(self.nonce);
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend(self.index.to_le_bytes());
        bytes.extend((self.name.len() as u32).to_le_bytes());
        bytes.extend(checksum(&bytes).to_le_bytes());
        bytes
    }

    /// Reads the end of a block of `block` bytes; `tail` is as much of it as is at hand. `None`: it is none, or damaged.
    pub fn decode(tail: &'a [u8], block: usize) -> Option<Self> {
        let (head, footer) = tail.split_at(tail.len().checked_sub(FOOTER)?);
        let word = |at: usize| Some(u32::from_le_bytes(footer.get(at..at + 4)?.try_into().ok()?));
        if footer[..8] != MAGIC || word(32)? != VERSION {
            return None;
        }
        let length = word(40)? as usize;
        let from = head.len().checked_sub(length)?;
        let found = Self {
            value: u64::from_le_bytes(footer[8..16].try_into().ok()?),
            nonce: footer[16..32].try_into().ok()?,
            index: word(36)?,
            name: &head[from..],
        };
        let named = if found.index == 0 { (1..=NAME_LIMIT).contains(&length) } else { length == 0 };
        let fits = found.part() + length + FOOTER <= block && found.value <= VALUE_LIMIT;
        let whole = found.index < found.blocks() && (found.value <= CHUNK || block == largest());
        let intact = checksum(&tail[from..tail.len() - 4]) == word(44)?;
        (intact && named && fits && whole).then_some(found)
    }

    /// Reads the end of the block that lies in this slot, whose reader holds it, into `space`.
    pub fn read(arena: &Arena, slot: SlotRef, space: &'a mut Tail) -> Option<Self> {
        let block = arena.layout().block_bytes();
        let read = |tail: &mut [u8]| arena.peek(slot.slot, block - tail.len(), tail).ok();
        read(&mut space.short)?;
        let length = &space.short[SHORT - 8..SHORT - 4];
        let length = u32::from_le_bytes(length.try_into().ok()?) as usize;
        if length + FOOTER <= SHORT {
            return Self::decode(&space.short, block);
        }
        if length > NAME_LIMIT {
            return None;
        }
        space.long = vec![0; length + FOOTER];
        read(&mut space.long)?;
        Self::decode(&space.long, block)
    }
}

/// Bytes of a block's end that are looked at first: most names are short, and then this is all.
const SHORT: usize = 128;

/// Space for the end of a block.
pub struct Tail {
    short: [u8; SHORT],
    long: Vec<u8>,
}

/// An empty space.
pub fn tail() -> Tail {
    Tail { short: [0; SHORT], long: Vec::new() }
}

fn largest() -> usize {
    Class::LARGEST.layout().block_bytes()
}

/// How many blocks a value of so many bytes takes.
pub fn blocks(value: u64) -> u32 {
    // Bounded by `VALUE_LIMIT`; what is beyond is refused before, or no trailer.
    u32::try_from(value.div_ceil(CHUNK)).unwrap_or(u32::MAX).max(1)
}

/// Writes a block: its part of the value, zeros, and the trailer, with their checksums.
///
/// # Errors
/// Bug: the slot is not of the class for it.
pub fn write(arena: &Arena, slot: SlotRef, part: &[u8], trailer: &Trailer<'_>) -> Result<(), Error> {
    let Layout { strips, strip_bytes } = arena.layout();
    let (strip, block) = (strip_bytes as usize, arena.layout().block_bytes());
    let end = trailer.encode();
    if part.len() != trailer.part() || part.len() + end.len() > block {
        return Err(Error::bug(format!("{} bytes do not fit a block of {block}", part.len())));
    }
    let whole = part.len() / strip;
    arena.store(slot, 0, &part[..whole * strip])?;
    let mut rest = vec![0; strip];
    for number in whole..strips as usize {
        let (from, to) = (number * strip, (number + 1) * strip);
        rest.fill(0);
        if from < part.len() {
            let value = &part[from..part.len().min(to)];
            rest[..value.len()].copy_from_slice(value);
        }
        // A long name may begin in the strip before the last one.
        let begin = block - end.len();
        if begin < to {
            let skip = from.saturating_sub(begin);
            let at = begin.max(from) - from;
            let piece = &end[skip..end.len().min(skip + strip - at)];
            rest[at..at + piece.len()].copy_from_slice(piece);
        }
        arena.store(slot, number as u32, &rest)?;
    }
    Ok(())
}

/// Copies the value's part out of a block, verified. False: a checksum did not hold.
///
/// # Errors
/// Bug: out of range.
pub fn read(arena: &Arena, slot: SlotRef, into: &mut [u8]) -> Result<bool, Error> {
    let strip = arena.layout().strip_bytes as usize;
    let whole = into.len() / strip;
    let (bulk, rest) = into.split_at_mut(whole * strip);
    if !arena.load_held(slot, 0, bulk)? {
        return Ok(false);
    }
    if rest.is_empty() {
        return Ok(true);
    }
    let mut last = vec![0; strip];
    let intact = arena.load_held(slot, whole as u32, &mut last)?;
    rest.copy_from_slice(&last[..rest.len()]);
    Ok(intact)
}

/// True if every strip of a block fits its checksum.
///
/// # Errors
/// Bug: out of range.
pub fn verify(arena: &Arena, slot: SlotRef) -> Result<bool, Error> {
    let Layout { strips, strip_bytes } = arena.layout();
    let mut strip = vec![0; strip_bytes as usize];
    for number in 0..strips {
        if !arena.load_held(slot, number, &mut strip)? {
            return Ok(false);
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    //! Goal: what is written is read again, whatever its size; bytes that are no trailer are none. Method: proptest over
    //! sizes, names, cuts and flips, against the value itself.
    use super::*;
    use proptest::prelude::*;

    fn fields() -> impl Strategy<Value = (u64, [u8; 16], Vec<u8>)> {
        (0..3 * CHUNK, any::<[u8; 16]>(), prop::collection::vec(any::<u8>(), 1..=NAME_LIMIT))
    }

    fn block_of(trailer: &Trailer<'_>) -> usize {
        Class::fitting(trailer.value, trailer.name.len()).layout().block_bytes()
    }

    #[test]
    fn classes_hold_powers_of_two() {
        let bytes: Vec<usize> = Class::all().map(|class| class.layout().block_bytes()).collect();
        assert_eq!(bytes[..3], [4096, 8192, 12288]);
        assert_eq!(bytes[9], (1 << 20) + 4096);
        for power in 12..=20 {
            assert_eq!(Class::fitting(1 << power, NAME_LIMIT).layout().block_bytes(), (1 << power) + 4096);
        }
        assert_eq!(Class::fitting(0, 1).number(), 0);
        assert_eq!(Class::fitting(CHUNK + 1, 1), Class::LARGEST);
        assert!(Class::all().all(|class| class.layout().strips <= 64 && Class::of(class.layout()) == Some(class)));
        assert!(Class::new(Class::COUNT).is_none());
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn values_of_any_size_come_back(value in 0..CHUNK as usize + 1, name in 1..=NAME_LIMIT, seed in any::<u64>()) {
            let class = Class::fitting(value as u64, name);
            let arena = Arena::sparse(8 << 20, class.layout()).expect("fits");
            let slot = arena.issue(1);
            let bytes: Vec<u8> = (0..value as u64).map(|at| (at.wrapping_mul(seed | 1) >> 7) as u8).collect();
            let name: Vec<u8> = (0..name).map(|at| at as u8 ^ seed as u8).collect();
            let trailer = Trailer { value: value as u64, nonce: [7; 16], index: 0, name: &name };
            write(&arena, slot, &bytes, &trailer).expect("it fits");
            let mut space = tail();
            prop_assert_eq!(Trailer::read(&arena, slot, &mut space), Some(trailer));
            let mut back = vec![1; value];
            prop_assert!(read(&arena, slot, &mut back).expect("in range") && verify(&arena, slot).expect("in range"));
            prop_assert_eq!(back, bytes);
            arena.corrupt_for_test(1, arena.layout().strips - 1);
            prop_assert!(!verify(&arena, slot).expect("in range"));
        }

        #[test]
        fn a_damaged_trailer_is_none((value, nonce, name) in fields(), at in any::<prop::sample::Index>(), bit in 0..8u8) {
            let trailer = Trailer { value, nonce, index: 0, name: &name };
            let mut bytes = trailer.encode();
            let block = block_of(&trailer);
            prop_assert_eq!(Trailer::decode(&bytes, block), Some(trailer));
            let at = at.index(bytes.len());
            bytes[at] ^= 1 << bit;
            prop_assert_eq!(Trailer::decode(&bytes, block), None);
        }

        #[test]
        fn noise_is_no_trailer(bytes in prop::collection::vec(any::<u8>(), 0..2000), block in 0..2_000_000usize) {
            prop_assert_eq!(Trailer::decode(&bytes, block), None);
        }

        // Fields that lie, with a checksum that holds: what a client with a bug could write.
        #[test]
        fn a_lying_trailer_is_none_or_fits(
            value in any::<u64>(), index in any::<u32>(), name in prop::collection::vec(any::<u8>(), 0..1100), class in 0..Class::COUNT
        ) {
            let block = Class(class).layout().block_bytes();
            let made = Trailer { value, nonce: [0; 16], index, name: &name };
            if let Some(found) = Trailer::decode(&made.encode(), block) {
                prop_assert!(found.part() + found.name.len() + FOOTER <= block && found.index < found.blocks());
            }
        }
    }
}
