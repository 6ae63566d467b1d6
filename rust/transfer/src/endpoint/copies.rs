//! Lists of copies, checked once and submitted as often as one likes.

use std::sync::{Arc, OnceLock};

use crate::endpoint::{RegionHandle, Registration};
use crate::error::Error;
use crate::mover::Part;
use crate::transport::Op;
use crate::types::{Incarnation, NodeId, RegionId, Span};

/// Most copies in one list.
pub const COPIES_LIMIT: usize = 1 << 20;

/// A list of copies between this engine and one peer.
#[derive(Debug)]
pub struct Copies {
    pub(super) parts: Arc<[Part]>,
    /// Whose memory the remote ends are; `None` in an empty list.
    pub(super) life: Option<(NodeId, Incarnation)>,
    pub(super) locals: Vec<RegionId>,
    pub(super) bytes: u64,
    /// The first copy whose remote region peers may not read, and the first that they may not write.
    unreadable: Option<usize>,
    unwritable: Option<usize>,
    /// The first copy whose local region cannot be written.
    unfillable: Option<usize>,
    /// Two copies that would write the same bytes: of a write, of a read. Looked for when it is first submitted so.
    clash: [OnceLock<Option<(usize, usize)>>; 2],
}

impl Copies {
    /// An empty list.
    pub fn build() -> CopiesBuilder {
        CopiesBuilder::default()
    }

    /// How many copies.
    pub fn len(&self) -> usize {
        self.parts.len()
    }

    /// True if there are none.
    pub fn is_empty(&self) -> bool {
        self.parts.is_empty()
    }

    /// Sum of their bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Finds what makes the whole list impossible in this direction.
    pub(super) fn check(&self, op: Op) -> Result<(), Error> {
        let (forbidden, verb) = match op {
            Op::Read => (self.unreadable, "read"),
            Op::Write => (self.unwritable, "write"),
        };
        if let Some(index) = forbidden {
            return Err(Error::bug(format!("copy {index}: its remote region was not registered for peers to {verb}")));
        }
        if op == Op::Read
            && let Some(index) = self.unfillable
        {
            return Err(Error::bug(format!(
                "copy {index}: its local memory is read-only, nothing can be read into it"
            )));
        }
        // The destinations' checksums are verified where the bytes land: overlapping ones would fail each other.
        let clash = self.clash[usize::from(op == Op::Read)].get_or_init(|| clash(&self.parts, op));
        match clash {
            None => Ok(()),
            Some((one, other)) => Err(Error::bug(format!(
                "copies {one} and {other} {verb} into the same bytes, and no order is promised between them: \
                 split them into two transfers"
            ))),
        }
    }
}

/// Two parts whose destinations overlap.
fn clash(parts: &[Part], op: Op) -> Option<(usize, usize)> {
    let at = |index: &usize| {
        let part = &parts[*index];
        let span = if op == Op::Write { part.remote } else { part.local };
        (span.region, span.life, span.offset, part.bytes)
    };
    let mut order: Vec<usize> = (0..parts.len()).filter(|index| parts[*index].bytes > 0).collect();
    if !order.is_sorted_by_key(at) {
        order.sort_unstable_by_key(at);
    }
    order.windows(2).find_map(|pair| {
        let ((region, life, offset, bytes), next) = (at(&pair[0]), at(&pair[1]));
        let overlap = (region, life) == (next.0, next.1) && next.2 < offset + bytes;
        overlap.then(|| (pair[0].min(pair[1]), pair[0].max(pair[1])))
    })
}

/// Collects copies.
#[derive(Debug, Default)]
pub struct CopiesBuilder {
    parts: Vec<Part>,
    life: Option<(NodeId, Incarnation)>,
    locals: Vec<RegionId>,
    bytes: u64,
    unreadable: Option<usize>,
    unwritable: Option<usize>,
    unfillable: Option<usize>,
}

impl CopiesBuilder {
    /// Adds one copy between these places.
    ///
    /// # Errors
    /// Bug: outside a region, a region that is not registered any more, or too many copies. Give up: handles of several
    /// peers, or of several lives of one.
    pub fn add(
        &mut self,
        local: &Registration,
        local_offset: u64,
        remote: &RegionHandle,
        remote_offset: u64,
        bytes: u64,
    ) -> Result<(), Error> {
        let index = self.parts.len();
        if index >= COPIES_LIMIT {
            return Err(Error::bug(format!("more than {COPIES_LIMIT} copies: submit several lists")));
        }
        for (side, offset, size) in [("local", local_offset, local.bytes()), ("remote", remote_offset, remote.bytes)] {
            if offset.checked_add(bytes).is_none_or(|end| end > size) {
                return Err(Error::bug(format!(
                    "copy {index}: {bytes} bytes at {offset} are outside its {side} region of {size} bytes"
                )));
            }
        }
        match &self.life {
            None => self.life = Some((remote.node.clone(), remote.incarnation)),
            Some((node, incarnation)) if *node == remote.node && *incarnation == remote.incarnation => {}
            Some((node, _)) => {
                return Err(Error::give_up(format!(
                    "copy {index}: its remote region is not of the same peer, in the same life, as those before it \
                     ({node}): one list, one peer"
                )));
            }
        }
        let region = local.region();
        if self.locals.last() != Some(&region) && !self.locals.contains(&region) {
            if local.is_fenced() {
                return Err(Error::bug(format!("copy {index}: its local region was unregistered")));
            }
            self.locals.push(region);
        }
        if !local.is_writable() {
            self.unfillable.get_or_insert(index);
        }
        if !remote.access.read {
            self.unreadable.get_or_insert(index);
        }
        if !remote.access.write {
            self.unwritable.get_or_insert(index);
        }
        self.bytes = self.bytes.saturating_add(bytes);
        self.parts.push(Part {
            local: Span { region, life: 0, offset: local_offset },
            remote: Span { region: remote.region, life: 0, offset: remote_offset },
            bytes,
            grain: remote.grain,
        });
        Ok(())
    }

    /// The list.
    pub fn finish(self) -> Copies {
        let Self { parts, life, locals, bytes, unreadable, unwritable, unfillable } = self;
        let clash = [OnceLock::new(), OnceLock::new()];
        Copies { parts: parts.into(), life, locals, bytes, unreadable, unwritable, unfillable, clash }
    }
}

#[cfg(test)]
mod tests {
    //! Goal: overlapping destinations are found, and nothing else is. Method: a quadratic search as the oracle.
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn clashes_are_found(spans in prop::collection::vec((1u32..3, 0u64..60, 0u64..6), 0..12)) {
            let elsewhere = Span { region: RegionId(9), life: 0, offset: 0 };
            let parts: Vec<Part> = spans
                .iter()
                .map(|&(region, offset, bytes)| {
                    let remote = Span { region: RegionId(region), life: 0, offset };
                    Part { local: elsewhere, remote, bytes, grain: 0 }
                })
                .collect();
            let overlap = |a: &(u32, u64, u64), b: &(u32, u64, u64)| {
                a.0 == b.0 && a.2 > 0 && b.2 > 0 && a.1 < b.1 + b.2 && b.1 < a.1 + a.2
            };
            let expected = spans.iter().enumerate().any(|(i, a)| spans[..i].iter().any(|b| overlap(a, b)));
            let found = clash(&parts, Op::Write);
            prop_assert_eq!(found.is_some(), expected);
            if let Some((one, other)) = found {
                prop_assert!(one < other && overlap(&spans[one], &spans[other]));
            }
        }
    }
}
