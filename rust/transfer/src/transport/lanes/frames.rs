//! What travels on a lane, as bytes. Pure functions: they never panic, allocate no more than the bytes they are given
//! deserve, and trust no declared size.
//!
//! A frame is a header, a table and a body (all numbers little-endian):
//!
//! ```text
//! offset  bytes  field
//!      0      4  magic "pyLN"
//!      4      4  CRC-32C of bytes 8..40
//!      8      1  version
//!      9      1  kind (see `Kind`)
//!     10      2  flags (see `Flags`)
//!     12      4  count: copies in this frame (FENCE: paths; RELEASE, REGION, REFUSE: 1), 1..=512
//!     16      8  sequence: running number of WRITE, READ and FENCE frames on this lane from 1; ACK, DATA, RELEASE repeat it
//!     24      8  bytes of the body
//!     32      4  bytes of the table
//!     36      4  CRC-32C of the table
//!     40      …  table
//!      …      …  body: the copies' bytes, back to back
//! ```
//!
//! ```text
//! kind     table                                           body                answer
//! WRITE    count entries, checksums of all copies          all copies          ACK
//! READ     count entries                                   none                DATA
//! ACK      one outcome byte per copy; none if all are Done none                none
//! DATA     one outcome byte per copy, checksums of those   the copies that     none (shm: RELEASE)
//!          that are Done                                   are Done
//! RELEASE  none                                            none                none
//! REGION   one region (40 bytes), see below                none                none
//! REFUSE   why the lane cannot go on, UTF-8, 1..=500 bytes none                the lane ends
//! FENCE    count numbers (u64) of the sender's paths that  none                ACK, without a table: nothing
//!          it has lost; those that there are not have ended                    is written for them any more
//!
//! entry, 24 bytes: region u32, life u32, offset u64 (where the target's bytes are), bytes u32, grain u32
//! ```
//!
//! A copy has one checksum (u32) per `grain` bytes, or one for all if that is 0; with `Flags::BARE` there are none.
//!
//! Where both ends are on one host (`Flags::SHARED`) a body stays where it is and whoever is to write it copies it from
//! there. Each entry of a WRITE, and each Done copy of a DATA, is then followed by a place of 16 bytes: region u32,
//! zero u32, offset u64, in the memory of the frame's sender. A REGION frame has told of that region before: number u32,
//! how u32 (0: by the descriptor beside this frame; 1: private memory of this process), bytes u64 (0: the region is gone),
//! address u64 of its first byte, and address u64 and value u64 of a random number: who reads that there reads the right
//! process. With `Flags::COMPARE` the bytes have no checksums, so whoever copies compares what has come with what is there.

use std::ops::BitOr;

use thiserror::Error;

use crate::memory::checksum;
use crate::region::sum_count;
use crate::transport::Outcome;
use crate::types::{RegionId, Span};

/// Version of the frames.
pub const VERSION: u8 = 2;
/// Bytes of a header.
pub const HEADER_BYTES: usize = 40;
/// Bytes of an entry.
pub const ENTRY_BYTES: usize = 24;
/// Bytes of a place.
pub const PLACE_BYTES: usize = 16;
/// Bytes of a path's number.
const PATH_BYTES: usize = 8;
/// Bytes of a REGION frame's table.
pub const REGION_BYTES: usize = 40;
/// Most bytes of a REFUSE frame's text.
pub const REFUSE_LIMIT: usize = 500;
/// Most copies in one frame.
pub const COPIES_LIMIT: usize = 512;
/// Most bytes of a table: a block of 10 MiB in strips of 64 bytes has 640 KiB of checksums.
pub const TABLE_LIMIT: usize = 1 << 20;
/// Most bytes of a body: the largest block that an arena takes.
pub const BODY_LIMIT: u64 = 1 << 30;

const MAGIC: [u8; 4] = *b"pyLN";

/// What a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// Put these bytes there.
    Write = 1,
    /// What became of a WRITE.
    Ack = 2,
    /// Send me the bytes from there.
    Read = 3,
    /// What a READ asked for.
    Data = 4,
    /// The bytes of a DATA have been copied from where they were.
    Release = 5,
    /// A region of the sender's that later frames name.
    Region = 6,
    /// The sender cannot go on.
    Refuse = 7,
    /// Paths of the sender that are lost: they are to end (`transport::fence`).
    Fence = 8,
}

impl Kind {
    fn from_byte(byte: u8) -> Option<Self> {
        [Self::Write, Self::Ack, Self::Read, Self::Data, Self::Release, Self::Region, Self::Refuse, Self::Fence]
            .into_iter()
            .find(|kind| *kind as u8 == byte)
    }
}

/// Bits of a header.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flags(u16);

impl Flags {
    /// No bit.
    pub const NONE: Self = Self(0);
    /// No checksums travel with the copies.
    pub const BARE: Self = Self(1);
    /// The body stays in the sender's memory.
    pub const SHARED: Self = Self(2);
    /// The copies have no checksums: whoever copies them compares what has come with what is there, where it sees both.
    pub const COMPARE: Self = Self(4);

    /// True if all of these bits are set.
    pub fn has(self, flags: Self) -> bool {
        self.0 & flags.0 == flags.0
    }
}

impl BitOr for Flags {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// Why a lane cannot go on: what came is not what may come.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum FrameError {
    /// The other side is no lane, or the stream is damaged.
    #[error("not a lane's frame")]
    Magic,
    /// A checksum over header or table does not hold.
    #[error("a frame's {0} is damaged")]
    Damaged(&'static str),
    /// Another version.
    #[error("the other side speaks lane protocol {0}, this side {VERSION}: upgrade the older one")]
    Version(u8),
    /// A kind or flag this version does not know.
    #[error("unknown frame kind {kind} or flags {flags:#x}")]
    Kind {
        /// The kind's byte.
        kind: u8,
        /// All flags.
        flags: u16,
    },
    /// More than is allowed.
    #[error("a frame with {what} {declared}, at most {limit} are allowed")]
    TooLarge {
        /// Of what.
        what: &'static str,
        /// As its header says.
        declared: u64,
        /// What is allowed.
        limit: u64,
    },
    /// The parts do not fit each other.
    #[error("a frame whose {0} does not fit the rest of it")]
    Inconsistent(&'static str),
    /// A frame that has no place here.
    #[error("{0:?} out of turn")]
    OutOfTurn(Kind),
}

/// A frame's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// What it is.
    pub kind: Kind,
    /// How it is to be read.
    pub flags: Flags,
    /// Copies.
    pub count: u32,
    /// Which frame it is, or answers.
    pub sequence: u64,
    /// Bytes of the body.
    pub body: u64,
    /// Bytes of the table.
    pub table: u32,
    /// Checksum of the table.
    pub table_sum: u32,
}

/// One copy, as the target sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// In the target's memory.
    pub at: Span,
    /// How many bytes.
    pub bytes: u32,
    /// Bytes per checksum; 0: all.
    pub grain: u32,
}

/// Where a body lies in the memory of a frame's sender.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Which region, as a REGION frame has named it.
    pub region: RegionId,
    /// Bytes from its start.
    pub offset: u64,
}

/// How the other side of a lane gets at a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    /// By mapping the descriptor that came beside the frame.
    Descriptor,
    /// By reading this process's private memory.
    Private,
}

/// A region of the frame's sender.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shared {
    /// Its number.
    pub region: RegionId,
    /// How to get at it.
    pub how: How,
    /// Its size.
    pub bytes: u64,
    /// Where it begins in its process.
    pub address: u64,
    /// Where its process keeps a random number, and which: who reads it reads the right process.
    pub cookie: (u64, u64),
}

/// A frame's table, by kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Table {
    /// Of a WRITE: copies, where their bodies lie (SHARED), all checksums.
    Write {
        /// The copies.
        entries: Vec<Entry>,
        /// One per copy if the body is shared, else empty.
        places: Vec<Place>,
        /// Of all copies, in order; empty if BARE.
        sums: Vec<u32>,
    },
    /// Of a READ.
    Read {
        /// The copies.
        entries: Vec<Entry>,
    },
    /// Of an ACK.
    Ack {
        /// One per copy; empty: all are `Done`.
        outcomes: Vec<Outcome>,
    },
    /// Of a DATA.
    Data {
        /// One per copy.
        outcomes: Vec<Outcome>,
        /// One per `Done` copy if the body is shared, else empty.
        places: Vec<Place>,
        /// Of the `Done` copies, in order; empty if BARE. How many, only who asked can say.
        sums: Vec<u32>,
    },
    /// Of a RELEASE.
    Release,
    /// Of a REGION.
    Region(Shared),
    /// Of a REFUSE.
    Refuse(String),
    /// Of a FENCE.
    Fence {
        /// Numbers of paths.
        paths: Vec<u64>,
    },
}

/// Puts a header before a table; the body follows by itself.
pub fn encode(kind: Kind, flags: Flags, count: usize, sequence: u64, body: u64, table: &[u8]) -> Vec<u8> {
    debug_assert!((1..=COPIES_LIMIT).contains(&count) && table.len() <= TABLE_LIMIT && body <= BODY_LIMIT);
    let mut bytes = Vec::with_capacity(HEADER_BYTES + table.len());
    bytes.extend(MAGIC);
    bytes.extend([0; 4]);
    bytes.extend([VERSION, kind as u8]);
    bytes.extend(flags.0.to_le_bytes());
    bytes.extend((count as u32).to_le_bytes());
    bytes.extend(sequence.to_le_bytes());
    bytes.extend(body.to_le_bytes());
    bytes.extend((table.len() as u32).to_le_bytes());
    bytes.extend(checksum(table).to_le_bytes());
    let sum = checksum(&bytes[8..]);
    bytes[4..8].copy_from_slice(&sum.to_le_bytes());
    bytes.extend(table);
    bytes
}

/// Appends an entry to a table.
pub fn put_entry(table: &mut Vec<u8>, entry: &Entry) {
    let mut bytes = [0; ENTRY_BYTES];
    bytes[..4].copy_from_slice(&entry.at.region.0.to_le_bytes());
    bytes[4..8].copy_from_slice(&entry.at.life.to_le_bytes());
    bytes[8..16].copy_from_slice(&entry.at.offset.to_le_bytes());
    bytes[16..20].copy_from_slice(&entry.bytes.to_le_bytes());
    bytes[20..].copy_from_slice(&entry.grain.to_le_bytes());
    table.extend(bytes);
}

/// Appends a place to a table.
pub fn put_place(table: &mut Vec<u8>, place: &Place) {
    let mut bytes = [0; PLACE_BYTES];
    bytes[..4].copy_from_slice(&place.region.0.to_le_bytes());
    bytes[8..].copy_from_slice(&place.offset.to_le_bytes());
    table.extend(bytes);
}

/// Appends checksums to a table.
pub fn put_sums(table: &mut Vec<u8>, sums: &[u32]) {
    table.reserve(4 * sums.len());
    sums.iter().for_each(|sum| table.extend(sum.to_le_bytes()));
}

/// An outcome's byte.
pub fn outcome_byte(outcome: Outcome) -> u8 {
    match outcome {
        Outcome::Done => 1,
        Outcome::Fenced => 2,
        Outcome::Corrupt => 3,
        Outcome::Denied => 4,
        // Never sent: who loses a lane can say nothing on it.
        Outcome::Lost => 0,
    }
}

/// The table of a REGION.
pub fn region_table(shared: &Shared) -> Vec<u8> {
    let mut table = Vec::with_capacity(REGION_BYTES);
    table.extend(shared.region.0.to_le_bytes());
    table.extend(u32::from(shared.how == How::Private).to_le_bytes());
    for word in [shared.bytes, shared.address, shared.cookie.0, shared.cookie.1] {
        table.extend(word.to_le_bytes());
    }
    table
}

/// The table of a FENCE.
pub fn fence_table(paths: &[u64]) -> Vec<u8> {
    paths.iter().flat_map(|path| path.to_le_bytes()).collect()
}

/// Reads and verifies a header. Sizes are within the limits then, and those that the kind fixes are right.
pub fn parse_header(bytes: &[u8; HEADER_BYTES]) -> Result<Header, FrameError> {
    if bytes[..4] != MAGIC {
        return Err(FrameError::Magic);
    }
    if checksum(&bytes[8..]) != u32_at(bytes, 4) {
        return Err(FrameError::Damaged("header"));
    }
    if bytes[8] != VERSION {
        return Err(FrameError::Version(bytes[8]));
    }
    let flags = u16::from_le_bytes([bytes[10], bytes[11]]);
    let kind = Kind::from_byte(bytes[9]).filter(|_| flags <= 7).ok_or(FrameError::Kind { kind: bytes[9], flags })?;
    let header = Header {
        kind,
        flags: Flags(flags),
        count: u32_at(bytes, 12),
        sequence: u64_at(bytes, 16),
        body: u64_at(bytes, 24),
        table: u32_at(bytes, 32),
        table_sum: u32_at(bytes, 36),
    };
    let limits = [
        ("copies", u64::from(header.count), COPIES_LIMIT as u64),
        ("bytes of table", u64::from(header.table), TABLE_LIMIT as u64),
        ("bytes of body", header.body, BODY_LIMIT),
    ];
    for (what, declared, limit) in limits {
        if declared > limit {
            return Err(FrameError::TooLarge { what, declared, limit });
        }
    }
    let (count, table) = (header.count as usize, header.table as usize);
    let shared = header.flags.has(Flags::SHARED);
    let sized = match kind {
        Kind::Write => table >= count * (ENTRY_BYTES + if shared { PLACE_BYTES } else { 0 }),
        Kind::Read => table == count * ENTRY_BYTES,
        Kind::Ack => table == 0 || table == count,
        Kind::Data => table >= count,
        Kind::Release => table == 0 && count == 1,
        Kind::Region => table == REGION_BYTES && count == 1,
        Kind::Refuse => (1..=REFUSE_LIMIT).contains(&table) && count == 1,
        Kind::Fence => table == count * PATH_BYTES,
    };
    if count == 0 || !sized {
        return Err(FrameError::Inconsistent("table"));
    }
    if header.body > 0 && (shared || !matches!(kind, Kind::Write | Kind::Data)) {
        return Err(FrameError::Inconsistent("body"));
    }
    Ok(header)
}

/// Verifies and reads the table behind a header (`bytes` is just the table).
pub fn parse_table(header: &Header, bytes: &[u8]) -> Result<Table, FrameError> {
    if bytes.len() != header.table as usize {
        return Err(FrameError::Inconsistent("table"));
    }
    if checksum(bytes) != header.table_sum {
        return Err(FrameError::Damaged("table"));
    }
    let count = header.count as usize;
    let (shared, bare) = (header.flags.has(Flags::SHARED), header.flags.has(Flags::BARE));
    match header.kind {
        Kind::Write => {
            let each = ENTRY_BYTES + if shared { PLACE_BYTES } else { 0 };
            let (front, rest) = bytes.split_at_checked(count * each).ok_or(FrameError::Inconsistent("table"))?;
            let (entries, bytes, count) = entries_of(front, each);
            let places = if shared {
                front.chunks_exact(each).map(|at| place_at(at, ENTRY_BYTES)).collect()
            } else {
                Vec::new()
            };
            if !shared && bytes != header.body {
                return Err(FrameError::Inconsistent("body"));
            }
            let sums = sums_of(rest)?;
            if sums.len() as u64 != if bare { 0 } else { count } {
                return Err(FrameError::Inconsistent("number of checksums"));
            }
            Ok(Table::Write { entries, places, sums })
        }
        Kind::Read => {
            let (entries, bytes, sums) = entries_of(bytes, ENTRY_BYTES);
            // The answer must fit into a frame as well.
            let table = count as u64 * (1 + PLACE_BYTES as u64) + 4 * sums;
            if bytes > BODY_LIMIT || table > TABLE_LIMIT as u64 {
                return Err(FrameError::Inconsistent("answer"));
            }
            Ok(Table::Read { entries })
        }
        Kind::Ack => Ok(Table::Ack { outcomes: outcomes_of(bytes)? }),
        Kind::Data => {
            let (front, rest) = bytes.split_at_checked(count).ok_or(FrameError::Inconsistent("table"))?;
            let outcomes = outcomes_of(front)?;
            let done = outcomes.iter().filter(|outcome| **outcome == Outcome::Done).count();
            let lying = if shared { done * PLACE_BYTES } else { 0 };
            let (lying, rest) = rest.split_at_checked(lying).ok_or(FrameError::Inconsistent("table"))?;
            let places = lying.chunks_exact(PLACE_BYTES).map(|at| place_at(at, 0)).collect();
            let sums = sums_of(rest)?;
            if bare && !sums.is_empty() {
                return Err(FrameError::Inconsistent("number of checksums"));
            }
            Ok(Table::Data { outcomes, places, sums })
        }
        Kind::Release => Ok(Table::Release),
        Kind::Region => {
            if bytes.len() != REGION_BYTES {
                return Err(FrameError::Inconsistent("table"));
            }
            let how = match u32_at(bytes, 4) {
                0 => How::Descriptor,
                1 => How::Private,
                _ => return Err(FrameError::Inconsistent("region")),
            };
            let region = RegionId(u32_at(bytes, 0));
            let (length, address, cookie) =
                (u64_at(bytes, 8), u64_at(bytes, 16), (u64_at(bytes, 24), u64_at(bytes, 32)));
            Ok(Table::Region(Shared { region, how, bytes: length, address, cookie }))
        }
        Kind::Refuse => Ok(Table::Refuse(String::from_utf8_lossy(bytes).into_owned())),
        Kind::Fence => Ok(Table::Fence { paths: bytes.chunks_exact(PATH_BYTES).map(|path| u64_at(path, 0)).collect() }),
    }
}

/// Entries that are `each` bytes apart, their bytes in all, and how many checksums they have.
fn entries_of(bytes: &[u8], each: usize) -> (Vec<Entry>, u64, u64) {
    let entries: Vec<Entry> = bytes.chunks_exact(each).map(entry_at).collect();
    let total = entries.iter().map(|entry| u64::from(entry.bytes)).sum();
    let sums = entries.iter().map(|entry| sum_count(entry.bytes.into(), entry.grain) as u64).sum();
    (entries, total, sums)
}

fn entry_at(bytes: &[u8]) -> Entry {
    let at = Span { region: RegionId(u32_at(bytes, 0)), life: u32_at(bytes, 4), offset: u64_at(bytes, 8) };
    Entry { at, bytes: u32_at(bytes, 16), grain: u32_at(bytes, 20) }
}

fn place_at(bytes: &[u8], at: usize) -> Place {
    Place { region: RegionId(u32_at(bytes, at)), offset: u64_at(bytes, at + 8) }
}

fn sums_of(bytes: &[u8]) -> Result<Vec<u32>, FrameError> {
    let (words, rest) = bytes.as_chunks::<4>();
    if !rest.is_empty() {
        return Err(FrameError::Inconsistent("number of checksums"));
    }
    Ok(words.iter().map(|word| u32::from_le_bytes(*word)).collect())
}

fn outcomes_of(bytes: &[u8]) -> Result<Vec<Outcome>, FrameError> {
    let outcome = |byte: &u8| match byte {
        1 => Ok(Outcome::Done),
        2 => Ok(Outcome::Fenced),
        3 => Ok(Outcome::Corrupt),
        4 => Ok(Outcome::Denied),
        _ => Err(FrameError::Inconsistent("outcome")),
    };
    bytes.iter().map(outcome).collect()
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}

#[cfg(test)]
mod tests {
    //! Goal: what is encoded decodes to the same; damage and lies are refused without panic. Method: proptest over
    //! frames, flipped bits, noise and noise behind right checksums.
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    fn entries() -> impl Strategy<Value = Vec<Entry>> {
        let entry = (any::<u32>(), any::<u32>(), any::<u64>(), 0u32..5000, 0u32..70).prop_map(
            |(region, life, offset, bytes, grain)| Entry {
                at: Span { region: RegionId(region), life, offset },
                bytes,
                grain: grain * 64,
            },
        );
        vec(entry, 1..20)
    }

    fn read(frame: &[u8]) -> Result<(Header, Table), FrameError> {
        let (front, table) = frame.split_first_chunk().expect("a header");
        let header = parse_header(front)?;
        let table = table.get(..header.table as usize).ok_or(FrameError::Inconsistent("length"))?;
        Ok((header, parse_table(&header, table)?))
    }

    fn write_frame(entries: &[Entry], places: &[Place], flags: Flags) -> (Vec<u8>, Vec<u32>) {
        let count = entries.iter().map(|entry| sum_count(entry.bytes.into(), entry.grain)).sum::<usize>();
        let sums: Vec<u32> = if flags.has(Flags::BARE) { Vec::new() } else { (0..count as u32).collect() };
        let body = if places.is_empty() { entries.iter().map(|entry| u64::from(entry.bytes)).sum() } else { 0 };
        let mut table = Vec::new();
        for (index, entry) in entries.iter().enumerate() {
            put_entry(&mut table, entry);
            places.get(index).into_iter().for_each(|place| put_place(&mut table, place));
        }
        put_sums(&mut table, &sums);
        (encode(Kind::Write, flags, entries.len(), 7, body, &table), sums)
    }

    proptest! {
        #[test]
        fn frames_round_trip(entries in entries(), bare: bool, shared: bool, pick in vec(1u8..5, 1..40), number: u64) {
            let mut flags = if bare { Flags::BARE } else { Flags::NONE };
            let mut places = Vec::new();
            if shared {
                flags = flags | Flags::SHARED;
                places = entries.iter().map(|entry| Place { region: entry.at.region, offset: number }).collect();
            }
            let (frame, sums) = write_frame(&entries, &places, flags);
            let (header, table) = read(&frame).expect("own encoding");
            prop_assert_eq!((header.kind, header.flags, header.sequence), (Kind::Write, flags, 7));
            prop_assert_eq!(table, Table::Write { entries: entries.clone(), places: places.clone(), sums });

            let mut table = Vec::new();
            entries.iter().for_each(|entry| put_entry(&mut table, entry));
            let (_, table) = read(&encode(Kind::Read, flags, entries.len(), 1, 0, &table)).expect("own encoding");
            prop_assert_eq!(table, Table::Read { entries });

            let outcomes = outcomes_of(&pick).expect("valid");
            let (_, table) = read(&encode(Kind::Ack, Flags::NONE, pick.len(), 1, 0, &pick)).expect("own encoding");
            prop_assert_eq!(table, Table::Ack { outcomes: outcomes.clone() });
            let (_, table) = read(&encode(Kind::Ack, Flags::NONE, pick.len(), 1, 0, &[])).expect("own encoding");
            prop_assert_eq!(table, Table::Ack { outcomes: Vec::new() });

            let mut table: Vec<u8> = outcomes.iter().map(|outcome| outcome_byte(*outcome)).collect();
            put_sums(&mut table, &[1, 2, 3]);
            let data = encode(Kind::Data, Flags::NONE, pick.len(), 1, 99, &table);
            let expected = Table::Data { outcomes, places: Vec::new(), sums: vec![1, 2, 3] };
            prop_assert_eq!(read(&data).expect("own encoding").1, expected);

            let shared = Shared { region: RegionId(4), how: How::Private, bytes: number, address: 5, cookie: (6, 7) };
            let told = encode(Kind::Region, Flags::NONE, 1, 1, 0, &region_table(&shared));
            prop_assert_eq!(read(&told).expect("own encoding").1, Table::Region(shared));

            let paths: Vec<u64> = pick.iter().map(|path| number ^ u64::from(*path)).collect();
            let (_, table) = read(&encode(Kind::Fence, Flags::NONE, paths.len(), 1, 0, &fence_table(&paths))).expect("own");
            prop_assert_eq!(table, Table::Fence { paths });
        }

        #[test]
        fn every_flipped_bit_is_noticed(entries in entries(), bit: prop::sample::Index) {
            let (mut frame, _) = write_frame(&entries, &[], Flags::NONE);
            let bit = bit.index(8 * frame.len());
            frame[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(read(&frame).is_err());
        }

        #[test]
        fn noise_is_refused_and_never_panics(mut noise in vec(any::<u8>(), 40..400), kind in 0u8..10, count in 0u32..20,
                                             flags in 0u16..9, body: u64, small: bool) {
            prop_assert!(read(&noise).is_err());
            // Behind right checksums, so that the lies get further.
            let table = noise.len() - HEADER_BYTES;
            let sum = checksum(&noise[HEADER_BYTES..]);
            noise[..4].copy_from_slice(&MAGIC);
            noise[8..10].copy_from_slice(&[VERSION, kind]);
            noise[10..12].copy_from_slice(&flags.to_le_bytes());
            noise[12..16].copy_from_slice(&count.to_le_bytes());
            noise[24..32].copy_from_slice(&(if small { body % 9 } else { body }).to_le_bytes());
            noise[32..36].copy_from_slice(&(table as u32).to_le_bytes());
            noise[36..40].copy_from_slice(&sum.to_le_bytes());
            let sum = checksum(&noise[8..HEADER_BYTES]);
            noise[4..8].copy_from_slice(&sum.to_le_bytes());
            if let Ok((header, _)) = read(&noise) {
                prop_assert!((1..=COPIES_LIMIT).contains(&(header.count as usize)) && header.body <= BODY_LIMIT);
            }
        }
    }

    #[test]
    fn lies_have_names() {
        let (frame, _) = write_frame(
            &[Entry { at: Span { region: RegionId(1), life: 0, offset: 0 }, bytes: 100, grain: 0 }],
            &[],
            Flags::NONE,
        );
        let lie = |at: usize, bytes: &[u8]| {
            let mut frame = frame.clone();
            frame[at..at + bytes.len()].copy_from_slice(bytes);
            let sum = checksum(&frame[8..HEADER_BYTES]);
            frame[4..8].copy_from_slice(&sum.to_le_bytes());
            read(&frame).expect_err("a lie").to_string()
        };
        assert!(lie(0, b"GET ").contains("not a lane"));
        assert!(lie(8, &[9]).contains("protocol 9"));
        assert!(lie(9, &[77]).contains("unknown frame kind 77"));
        assert!(lie(10, &[64]).contains("flags 0x40"));
        assert!(lie(12, &513u32.to_le_bytes()).contains("513"));
        assert!(lie(12, &2u32.to_le_bytes()).contains("table"));
        assert!(lie(24, &(1u64 << 63).to_le_bytes()).contains("9223372036854775808"));
        assert!(lie(24, &99u64.to_le_bytes()).contains("body"));
        assert!(lie(32, &u32::MAX.to_le_bytes()).contains("bytes of table"));
    }
}
