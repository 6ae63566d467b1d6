//! Blocks are looked at where they lie in DRAM; what does not lie there is brought first, by and by, as far as there is room.

use std::collections::VecDeque;

use super::classes::{CHUNK, Class};
use super::messages::{ObjectEvent, ObjectRequest, Sighting, UNKNOWN, Wanted};
use super::pool::{Pool, ROUND_BYTES, TRIES, unexpected};
use super::road::Pinned;
use crate::error::Error;
use crate::messages::Refusal;
use crate::types::BlockKey;

/// Bytes that come from other nodes before they are looked at, while as much again and more follows.
const ELSEWHERE_BYTES: u64 = 4 << 20;

/// Blocks of a large value that are looked at together.
pub(super) const WINDOW: usize = 16;

/// Why a block cannot be looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lack {
    /// There is none.
    Missing,
    /// There is one, but what has it does not give it now.
    Unreachable,
}

/// A block to be looked at.
pub(super) struct Part {
    pub key: BlockKey,
    /// The block before it, and its index in its value.
    pub parent: BlockKey,
    pub index: u32,
}

impl Part {
    /// The first block of a value.
    pub fn head(key: BlockKey) -> Self {
        Self { key, parent: BlockKey([0; 16]), index: 0 }
    }
}

/// What is done with a block, by its place in the list of those that are asked for.
pub(super) type Visitor<'a> = &'a mut dyn FnMut(usize, Result<Pinned, Lack>) -> Result<(), Error>;

impl Pool {
    /// Calls `visitor` once for each of these blocks, first for those that are in DRAM. `names`: they are heads, and count as
    /// asked for. A visitor that keeps what it gets leaves less room for the others.
    ///
    /// # Errors
    /// Retry: no room for what is to be brought, or the daemon is gone. The visitor's own.
    pub(super) fn visit(&self, blocks: &[Part], names: bool, visitor: Visitor<'_>) -> Result<(), Error> {
        let keys: Vec<BlockKey> = blocks.iter().map(|block| block.key).collect();
        let mut behind = VecDeque::new();
        for (at, seen) in self.road.pin(&keys, names)?.into_iter().enumerate() {
            match seen {
                Sighting::Here(pinned) => visitor(at, Ok(pinned))?,
                Sighting::Missing => visitor(at, Err(Lack::Missing))?,
                Sighting::Behind { class } => behind.push_back((at, class, 0)),
            }
        }
        // The last one of those that were looked at is let go of by now, unless the visitor keeps it.
        let mut waited = 0;
        // How many of those in front were told to come already.
        let mut coming = 0;
        while !behind.is_empty() {
            coming = self.visit_come(&keys, &mut behind, coming, visitor)?;
            coming = self.expect(&keys, &behind, coming);
            let window = next_window(&mut behind);
            if window.is_empty() {
                break;
            }
            coming = coming.saturating_sub(window.len());
            let mut full = false;
            let mut seen_some = false;
            let brought = self.bring(blocks, &window)?;
            let keys: Vec<BlockKey> = window.iter().map(|(at, ..)| keys[*at]).collect();
            let seen = self.road.pin(&keys, false)?;
            let mut again = Vec::new();
            for (((at, class, tries), brought), seen) in window.into_iter().zip(brought).zip(seen) {
                let lack = match seen {
                    Sighting::Here(pinned) => {
                        seen_some = true;
                        visitor(at, Ok(pinned))?;
                        continue;
                    }
                    Sighting::Behind { .. } | Sighting::Missing if brought == Err(Refusal::Full) => {
                        full = true;
                        again.push((at, class, tries));
                        continue;
                    }
                    Sighting::Behind { .. } if tries < TRIES && brought.is_ok() => {
                        // It was evicted before it was pinned.
                        again.push((at, class, tries + 1));
                        continue;
                    }
                    Sighting::Behind { .. } => Lack::Unreachable,
                    Sighting::Missing => Lack::Missing,
                };
                visitor(at, Err(lack))?;
            }
            again.into_iter().rev().for_each(|block| behind.push_front(block));
            if seen_some {
                waited = 0;
            } else if full {
                waited += 1;
                if waited > TRIES || !self.await_room()? {
                    return Err(Error::retry(
                        "no room to bring what is asked for into DRAM, which is in use: close views, ask for fewer values \
                         at a time, copy them by get_into, or open a larger pool",
                    ));
                }
            }
        }
        Ok(())
    }

    /// Visits those of the blocks in front that have come by themselves. Returns how many have not.
    fn visit_come(
        &self,
        keys: &[BlockKey],
        behind: &mut VecDeque<(usize, u8, usize)>,
        coming: usize,
        visitor: Visitor<'_>,
    ) -> Result<usize, Error> {
        if coming == 0 {
            return Ok(0);
        }
        let front: Vec<(usize, u8, usize)> = behind.drain(..behind.len().min(coming)).collect();
        let names: Vec<BlockKey> = front.iter().map(|(at, ..)| keys[*at]).collect();
        let mut rest = Vec::new();
        for (block, seen) in front.into_iter().zip(self.road.pin(&names, false)?) {
            match seen {
                Sighting::Here(pinned) => visitor(block.0, Ok(pinned))?,
                _ => rest.push(block),
            }
        }
        let left = rest.len();
        rest.into_iter().rev().for_each(|block| behind.push_front(block));
        Ok(left)
    }

    /// Has what may be on other nodes come here, so much of it that what follows the next window comes while that is looked
    /// at. `told`: how many in front were told to. Returns how many have been now.
    fn expect(&self, keys: &[BlockKey], behind: &VecDeque<(usize, u8, usize)>, told: usize) -> usize {
        let (ahead, window) = ((ROUND_BYTES / CHUNK) as usize, (ELSEWHERE_BYTES / CHUNK) as usize);
        let next = behind.iter().take(ahead).take_while(|(_, class, _)| *class == UNKNOWN);
        let names: Vec<BlockKey> = next.map(|(at, ..)| keys[*at]).collect();
        if names.len() > told.max(window) {
            self.road.tell(ObjectRequest::Come { keys: names[told..].to_vec() });
        }
        if names.len() > window { names.len() } else { told }
    }

    /// Per block of the window: it is in DRAM, or why not.
    fn bring(&self, blocks: &[Part], window: &[(usize, u8, usize)]) -> Result<Vec<Result<(), Refusal>>, Error> {
        let wanted = window.iter().map(|(at, class, _)| {
            let Part { key, parent, index } = blocks[*at];
            Wanted { put: 0, class: *class, key, parent, index }
        });
        let wanted: Vec<Wanted> = wanted.collect();
        let count = wanted.len();
        match self.road.ask(|ticket| ObjectRequest::Bring { ticket, wanted })? {
            ObjectEvent::Brought { blocks, .. } if blocks.len() == count => Ok(blocks),
            event => Err(unexpected(&event)),
        }
    }

    /// After a refusal for want of room: whether it is worth another try.
    pub(super) fn await_room(&self) -> Result<bool, Error> {
        match self.road.ask(|ticket| ObjectRequest::AwaitRoom { ticket })? {
            ObjectEvent::Room { more, .. } => Ok(more),
            event => Err(unexpected(&event)),
        }
    }
}

/// As many as may be brought at a time: at least one.
fn next_window(behind: &mut VecDeque<(usize, u8, usize)>) -> Vec<(usize, u8, usize)> {
    let (mut window, mut bytes) = (Vec::new(), 0);
    while let Some(&block) = behind.front() {
        let more = Class::new(block.1).map_or(CHUNK, |class| class.layout().block_bytes() as u64);
        let most = if block.1 == UNKNOWN { ELSEWHERE_BYTES } else { ROUND_BYTES };
        if !window.is_empty() && bytes + more > most {
            break;
        }
        bytes += more;
        window.push(block);
        behind.pop_front();
    }
    window
}
