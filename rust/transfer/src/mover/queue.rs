//! Which transfer to a peer sends its next copy: priorities with a share for the lower ones, turns within each.
//!
//! The highest priority goes first. For every byte that it sends, each lower one that waits earns an eighth of a byte,
//! and may pass as soon as it has earned its next copy: so urgent copies hardly notice the others, and the others never
//! starve. Among transfers of one priority each sends [`QUANTUM`] bytes, then it is the next one's turn.

use std::collections::VecDeque;

use super::{Priority, TransferId};
use crate::transport::PIECE_BYTES;

/// Bytes that one transfer sends before the next of its priority has its turn: one full copy.
const QUANTUM: u64 = PIECE_BYTES as u64;
/// What a copy costs beside its bytes, in bytes: header, acknowledgement, and the work on them.
const OVERHEAD: u64 = 512;
/// One byte in so many goes to a lower priority that waits.
const SHARE: u64 = 8;
/// Priorities.
const LEVELS: usize = 3;

/// The transfers to one peer that have something to send.
#[derive(Debug, Default)]
pub(super) struct Queue {
    levels: [Level; LEVELS],
}

#[derive(Debug, Default)]
struct Level {
    ring: VecDeque<TransferId>,
    /// Cost of what the front has sent in its turn.
    spent: u64,
    /// What higher levels have given.
    earned: u64,
    /// Entries whose transfers have left.
    stale: usize,
}

impl Queue {
    /// A transfer has something to send. It must not be in the queue already.
    pub fn join(&mut self, priority: Priority, id: TransferId) {
        self.levels[priority as usize].ring.push_back(id);
    }

    /// As `join`, for one that only just had its turn: it goes on where it was.
    pub fn rejoin(&mut self, priority: Priority, id: TransferId) {
        self.levels[priority as usize].ring.push_front(id);
    }

    /// The transfer whose turn it is, `next` being the bytes of each one's next copy (`None`: it has left).
    pub fn turn(&mut self, next: impl Fn(TransferId) -> Option<u64>) -> Option<(Priority, TransferId)> {
        let mut chosen = None;
        for priority in [Priority::Urgent, Priority::Normal, Priority::Background] {
            let level = &mut self.levels[priority as usize];
            let Some((id, bytes)) = level.front(&next) else { continue };
            // The lowest that has earned its copy; if none has, the highest.
            if chosen.is_none() || level.earned >= bytes + OVERHEAD {
                chosen = Some((priority, id));
            }
        }
        chosen
    }

    /// True if at most one transfer stands in the queue, so that its turn does not end.
    pub fn is_alone(&self) -> bool {
        self.levels.iter().map(|level| level.ring.len()).sum::<usize>() <= 1
    }

    /// The transfer whose turn it is sends a copy; `more` if it has another one.
    pub fn sends(&mut self, priority: Priority, bytes: u64, more: bool) {
        let cost = bytes + OVERHEAD;
        for lower in &mut self.levels[priority as usize + 1..] {
            if !lower.ring.is_empty() {
                lower.earned += cost / SHARE;
            }
        }
        let level = &mut self.levels[priority as usize];
        level.earned = level.earned.saturating_sub(cost);
        level.spent += cost;
        if !more {
            level.ring.pop_front();
        } else if level.spent >= QUANTUM {
            level.ring.rotate_left(1);
        } else {
            return;
        }
        level.spent = 0;
        if level.ring.is_empty() {
            // Nothing waits, so nothing is owed.
            level.earned = 0;
        }
    }

    /// A transfer that is in the queue leaves it: from now on `next` says `None` of it.
    pub fn leaves(&mut self, priority: Priority, next: impl Fn(TransferId) -> Option<u64>) {
        let level = &mut self.levels[priority as usize];
        level.stale += 1;
        // Looking for it would make cancelling n transfers cost n²; so all that have left are swept out now and then.
        if level.stale * 2 > level.ring.len() {
            level.ring.retain(|id| next(*id).is_some());
            level.stale = 0;
        }
    }

    /// All entries, for checks.
    pub fn entries(&self) -> impl Iterator<Item = TransferId> {
        self.levels.iter().flat_map(|level| level.ring.iter().copied())
    }
}

impl Level {
    fn front(&mut self, next: impl Fn(TransferId) -> Option<u64>) -> Option<(TransferId, u64)> {
        while let Some(id) = self.ring.front() {
            if let Some(bytes) = next(*id) {
                return Some((*id, bytes));
            }
            self.ring.pop_front();
            self.spent = 0;
            self.stale = self.stale.saturating_sub(1);
        }
        self.earned = 0;
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PIECE: u64 = PIECE_BYTES as u64;

    /// Sends `rounds` copies of the sizes that `size` gives, and tells whose they were.
    fn drain(queue: &mut Queue, rounds: usize, size: impl Fn(TransferId) -> u64) -> Vec<TransferId> {
        let mut sent = Vec::new();
        for _ in 0..rounds {
            let (priority, id) = queue.turn(|id| Some(size(id))).expect("somebody waits");
            queue.sends(priority, size(id), true);
            sent.push(id);
        }
        sent
    }

    fn count(sent: &[TransferId], id: TransferId) -> usize {
        sent.iter().filter(|sent| **sent == id).count()
    }

    // Goal: urgent first, and yet the others get their eighth of the bytes. Method: all three wait for ever; first
    // with copies of one size, then with small urgent ones before full ones.
    #[test]
    fn nobody_starves() {
        let mut queue = Queue::default();
        queue.join(Priority::Background, 3);
        queue.join(Priority::Normal, 2);
        queue.join(Priority::Urgent, 1);
        let sent = drain(&mut queue, 1000, |_| PIECE);
        assert_eq!(sent[..8], [1; 8]);
        assert!(count(&sent, 1) >= 750 && count(&sent, 2) >= 90 && count(&sent, 3) >= 90, "{sent:?}");
        let size = |id| if id == 1 { 4096 } else { PIECE };
        let sent = drain(&mut queue, 100_000, size);
        let share = |id| count(&sent, id) as u64 * (size(id) + OVERHEAD);
        let urgent = share(1);
        for lower in [2, 3] {
            assert!((urgent / 10..urgent / 6).contains(&share(lower)), "{} of {urgent} bytes", share(lower));
        }
    }

    // Goal: transfers of one priority share the bytes, whatever the size of their copies. Method: three sizes.
    #[test]
    fn one_priority_shares_by_bytes() {
        let mut queue = Queue::default();
        (1..=3).for_each(|id| queue.join(Priority::Normal, id));
        let size = |id: TransferId| [4096, 65536, PIECE][id as usize - 1];
        let sent = drain(&mut queue, 100_000, size);
        let bytes: Vec<u64> = (1..=3).map(|id| count(&sent, id) as u64 * (size(id) + OVERHEAD)).collect();
        assert!(bytes.iter().max() < bytes.iter().min().map(|least| least * 3 / 2).as_ref(), "{bytes:?}");
    }

    // Goal: leaving is cheap and leaves nothing behind. Method: many join and leave while nothing is sent.
    #[test]
    fn those_who_left_are_forgotten() {
        let mut queue = Queue::default();
        queue.join(Priority::Normal, 0);
        for id in 1..10_000 {
            queue.join(Priority::Normal, id);
            queue.leaves(Priority::Normal, |other| (other == 0).then_some(1));
            assert!(queue.entries().count() <= 4);
        }
        assert_eq!(queue.turn(|id| (id == 0).then_some(1)), Some((Priority::Normal, 0)));
        queue.sends(Priority::Normal, 1, false);
        assert_eq!(queue.turn(|id| (id == 0).then_some(1)), None);
    }
}
