//! One transfer: its list of parts, cut into copies one by one as they are sent.

use std::sync::Arc;

use super::{Ended, Failure, Part, Priority, Progress, Request};
use crate::region::{Region, Regions};
use crate::transport::{Copy, CopyId, Kind, Op};
use crate::types::{Nanos, RegionId, Span};

/// A part's bytes that one copy moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub part: u32,
    /// From the part's start.
    pub offset: u64,
    pub bytes: u32,
    /// How often it was sent before.
    pub attempt: u32,
}

#[derive(Debug)]
pub(super) struct Transfer {
    /// Number of the peer's life in the mover.
    pub peer: u64,
    pub op: Op,
    parts: Arc<[Part]>,
    piece_bytes: u32,
    pub priority: Priority,
    pub deadline: Option<Nanos>,
    pub retries: u32,
    progress: Progress,
    /// The next part to cut, and how far it is cut.
    part: usize,
    offset: u64,
    /// Before all that is not cut yet: what goes again, having been lost or corrupted. Not longer than what was under way.
    again: Vec<Piece>,
    /// It stands in its peer's queue.
    pub queued: bool,
    pub in_flight: usize,
    /// Decided; told when nothing is under way any more.
    pub ending: Option<Ended>,
    /// Nothing was left to send when its end was decided: should all that is under way succeed, it is done after all.
    whole: bool,
    /// The last path that a copy went.
    pub via: Option<Kind>,
    pub fallback: bool,
    pub resent: u32,
    /// The peer's count of vain rounds when it was submitted.
    pub round: u64,
}

impl Transfer {
    pub fn new(peer: u64, round: u64, request: Request, piece_bytes: u32) -> Self {
        let Request { op, parts, priority, deadline, retries } = request;
        let bytes = parts.iter().map(|part| part.bytes).fold(0, u64::saturating_add);
        Self {
            peer,
            op,
            parts,
            piece_bytes,
            priority,
            deadline,
            retries,
            progress: Progress { bytes_done: 0, bytes },
            part: 0,
            offset: 0,
            again: Vec::new(),
            queued: false,
            in_flight: 0,
            ending: None,
            whole: false,
            via: None,
            fallback: false,
            resent: 0,
            round,
        }
    }

    pub fn parts(&self) -> usize {
        self.parts.len()
    }

    pub fn progress(&self) -> Progress {
        self.progress
    }

    /// What of the list can be seen to be wrong from here: sums that overflow, and this side's ends that are not in
    /// registered buffers. It ends the transfer before anything moves; the rest is checked where the memory is.
    pub fn wrong(&self, regions: &Regions) -> Option<Ended> {
        let mut last: Option<(RegionId, Option<u64>)> = None;
        let failed = |part, why, message: &str| Some(Ended::Failed { part, why, message: message.into() });
        for (index, part) in self.parts.iter().enumerate() {
            let Some(end) = part.local.offset.checked_add(part.bytes) else {
                return failed(index, Failure::Denied, "the local end is beyond all memory");
            };
            if part.remote.offset.checked_add(part.bytes).is_none() {
                return failed(index, Failure::Denied, "the remote end is beyond all memory");
            }
            if last.is_none_or(|(region, _)| region != part.local.region) {
                let bytes = match regions.get(part.local.region) {
                    None => return failed(index, Failure::Fenced, "the local region is not registered (any more)"),
                    // Whose spans are checked slot by slot.
                    Some(Region::Arena(_)) => None,
                    Some(Region::Buffer(buffer)) => Some(buffer.bytes()),
                };
                last = Some((part.local.region, bytes));
            }
            if last.and_then(|(_, bytes)| bytes).is_some_and(|bytes| end > bytes) {
                return failed(index, Failure::Denied, "the local end is outside its region");
            }
        }
        None
    }

    /// The next piece, what goes again first; `None` if all have been sent.
    pub fn next(&self) -> Option<Piece> {
        self.again.last().copied().or_else(|| self.cut())
    }

    /// Takes the piece that `next` has just returned. True if another one follows.
    pub fn sends(&mut self, piece: &Piece) -> bool {
        if self.again.pop().is_none() {
            self.offset += u64::from(piece.bytes);
            if self.offset >= self.parts[self.part].bytes {
                (self.part, self.offset) = (self.part + 1, 0);
            }
        }
        !self.again.is_empty() || self.part < self.parts.len()
    }

    /// The next piece is to be taken again before all others.
    pub fn give_back(&mut self, piece: Piece) {
        self.again.push(piece);
    }

    fn cut(&self) -> Option<Piece> {
        let part = self.parts.get(self.part)?;
        // Ends at a border of grains, so that checksums are never cut; one larger grain is a piece of its own. A part
        // of no bytes is a piece of no bytes.
        let most = match part.grain {
            0 => self.piece_bytes,
            grain => grain * (self.piece_bytes / grain).max(1),
        };
        let bytes = (part.bytes - self.offset).min(u64::from(most)) as u32;
        Some(Piece { part: self.part as u32, offset: self.offset, bytes, attempt: 0 })
    }

    pub fn copy(&self, id: CopyId, piece: &Piece) -> Copy {
        let Part { local, remote, grain, .. } = self.parts[piece.part as usize];
        let at = |span: Span| Span { offset: span.offset + piece.offset, ..span };
        Copy { id, op: self.op, local: at(local), remote: at(remote), bytes: piece.bytes, grain }
    }

    pub fn piece_done(&mut self, piece: &Piece) {
        self.progress.bytes_done += u64::from(piece.bytes);
    }

    /// Its end is decided: nothing more is sent.
    pub fn end(&mut self, ended: Ended) {
        let failed = matches!(ended, Ended::Failed { .. });
        self.whole = !failed && self.in_flight > 0 && self.next().is_none();
        self.part = self.parts.len();
        self.again = Vec::new();
        self.ending = Some(ended);
    }

    /// A piece failed after the end was decided.
    pub fn piece_missing(&mut self) {
        self.whole = false;
    }

    /// How it ended, once nothing is under way.
    pub fn outcome(&mut self) -> Ended {
        match (self.ending.take(), self.via) {
            (Some(ended), _) if !self.whole => ended,
            (_, Some(via)) => Ended::Done { via, fallback: self.fallback, retries: self.resent },
            (_, None) => unreachable!("whole, though nothing was ever sent: {self:?}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::region::{Access, Buffer};
    use crate::transport::PIECE_BYTES;

    fn request(parts: &[(u64, u32)]) -> Request {
        let span = Span { region: RegionId(RegionId::ARENAS), life: 0, offset: 10 };
        let part = |&(bytes, grain): &(u64, u32)| Part { local: span, remote: span, bytes, grain };
        Request::new(Op::Write, parts.iter().map(part).collect())
    }

    fn pieces(parts: &[(u64, u32)]) -> Vec<(u32, u64, u32)> {
        let mut transfer = Transfer::new(1, 0, request(parts), PIECE_BYTES);
        std::iter::from_fn(|| {
            let piece = transfer.next()?;
            transfer.sends(&piece);
            Some((piece.part, piece.offset, piece.bytes))
        })
        .collect()
    }

    // Goal: pieces cover every byte once, end at grains, and are no larger than allowed. Method: sizes around borders.
    #[test]
    fn cutting() {
        let most = PIECE_BYTES;
        assert_eq!(pieces(&[]), []);
        assert_eq!(pieces(&[(0, 0), (1, 0), (0, 512)]), [(0, 0, 0), (1, 0, 1), (2, 0, 0)]);
        assert_eq!(pieces(&[(u64::from(most) + 1, 0)]), [(0, 0, most), (0, u64::from(most), 1)]);
        assert_eq!(pieces(&[(250_000, 100_000)]), [(0, 0, 200_000), (0, 200_000, 50_000)]);
        let large = most * 3;
        assert_eq!(pieces(&[(u64::from(large) * 2, large)]), [(0, 0, large), (0, u64::from(large), large)]);
        assert_eq!(pieces(&[(5, u32::MAX)]), [(0, 0, 5)]);
    }

    // Goal: a list that is wrong on this side is refused before anything moves. Method: each mistake, in the last part.
    #[test]
    fn wrong_lists() {
        let regions = Regions::new();
        regions.add(Arc::new(Buffer::owned(100, Access { read: true, write: true })));
        let good = request(&[(90, 0)]).parts[0];
        let judge = |bad: Part| match Transfer::new(1, 0, Request::new(Op::Read, [good, bad].into()), PIECE_BYTES)
            .wrong(&regions)
        {
            None => None,
            Some(Ended::Failed { part, why, .. }) => Some((part, why)),
            Some(other) => panic!("{other:?}"),
        };
        assert_eq!(judge(good), None);
        assert_eq!(judge(Part { bytes: 91, ..good }), Some((1, Failure::Denied)));
        assert_eq!(judge(Part { bytes: u64::MAX, ..good }), Some((1, Failure::Denied)));
        let far = Span { offset: u64::MAX, ..good.remote };
        assert_eq!(judge(Part { remote: far, ..good }), Some((1, Failure::Denied)));
        let foreign = Span { region: RegionId(999), ..good.local };
        assert_eq!(judge(Part { local: foreign, ..good }), Some((1, Failure::Fenced)));
    }
}
