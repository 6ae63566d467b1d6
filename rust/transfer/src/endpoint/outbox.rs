//! Notifications on their way to one peer, sans-IO: in order, each delivered once while both sides live.
//!
//! ```text
//!   entries:  [ sent, unanswered … | not sent … ]        numbers: first, first + 1, …
//!               Taken(n) takes from the front     Full: all count as not sent; wait for Room
//!               session over: sent ones are in doubt until Resume(n) of the next session says which were taken
//! ```
//!
//! An entry that its owner gave up while it was in doubt stays as a gap: it must not be sent again, but it counts.

use std::collections::VecDeque;

/// Notifications that may be sent and unanswered: 4 MiB of the longest ones.
const WINDOW: usize = 64;

/// What is to be delivered; `T` names who waits for it.
pub struct Outbox<T> {
    entries: VecDeque<Entry<T>>,
    /// How many at the front were sent on the current session, or (between sessions) on the last one.
    sent: usize,
    /// Number of the front entry.
    first: u64,
    /// A session stands, and its receiver has room as far as we know.
    ready: bool,
    /// A session stands.
    standing: bool,
    /// One has stood, in this life of the receiver.
    met: bool,
}

struct Entry<T> {
    owner: Option<T>,
    payload: Vec<u8>,
}

/// The peer said what cannot be: it is broken or hostile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Nonsense;

impl<T: Copy + PartialEq> Outbox<T> {
    /// Empty, no session.
    pub fn new() -> Self {
        Self { entries: VecDeque::new(), sent: 0, first: 1, ready: false, standing: false, met: false }
    }

    /// Queues a notification.
    pub fn push(&mut self, owner: T, payload: Vec<u8>) {
        self.entries.push_back(Entry { owner: Some(owner), payload });
    }

    /// The next one to be sent, if one may be. Whoever sends it calls [`Outbox::sent`].
    pub fn next(&self) -> Option<(u64, &[u8])> {
        if !self.ready || self.sent >= WINDOW {
            return None;
        }
        self.entries.get(self.sent).map(|entry| (self.first + self.sent as u64, &entry.payload[..]))
    }

    /// The one that `next` told was sent.
    pub fn sent(&mut self) {
        self.sent += 1;
    }

    /// All up to this number are delivered: returns who waited for them.
    pub fn taken(&mut self, through: u64) -> Result<Vec<T>, Nonsense> {
        let count = through.saturating_add(1).saturating_sub(self.first);
        if count > self.sent as u64 {
            return Err(Nonsense);
        }
        let count = count as usize;
        self.first += count as u64;
        self.sent -= count;
        Ok(self.entries.drain(..count).filter_map(|entry| entry.owner).collect())
    }

    /// As `taken`; what was sent behind it must be sent again, after `room`.
    pub fn full(&mut self, through: u64) -> Result<Vec<T>, Nonsense> {
        let taken = self.taken(through)?;
        self.ready = false;
        self.unsend();
        Ok(taken)
    }

    /// The receiver has room again.
    pub fn room(&mut self) {
        self.ready = self.standing;
    }

    /// A session stands whose acceptor has taken all up to this number: returns who waited for those.
    pub fn resume(&mut self, through: u64) -> Result<Vec<T>, Nonsense> {
        let next = through.checked_add(1).ok_or(Nonsense)?;
        // On the first session nothing was sent yet: those were of a connection that was closed, and we go on behind them.
        // Later, an acceptor that forgot us begins anew: nothing more of ours is known to be taken.
        let taken = if std::mem::replace(&mut self.met, true) { self.taken(through)? } else { Vec::new() };
        self.first = next;
        self.unsend();
        (self.ready, self.standing) = (true, true);
        Ok(taken)
    }

    /// The session is over.
    pub fn interrupted(&mut self) {
        (self.ready, self.standing) = (false, false);
    }

    /// The owner waits no more. False if the peer may be taking it just now: its answer, or the end of the session,
    /// decides. True: it is forgotten, and will not be sent (again).
    pub fn abandon(&mut self, owner: T) -> bool {
        let Some(index) = self.entries.iter().position(|entry| entry.owner == Some(owner)) else { return true };
        if index >= self.sent {
            self.entries.remove(index);
            true
        } else if self.standing {
            false
        } else {
            self.entries[index].owner = None;
            true
        }
    }

    /// Nothing that is here will be sent (again): returns who waited. Between sessions only.
    pub fn give_up(&mut self) -> Vec<T> {
        let owners = self.entries.iter_mut().filter_map(|entry| entry.owner.take()).collect();
        self.entries.truncate(self.sent);
        owners
    }

    /// The receiver's life is over, the next one counts from 1: returns who waited.
    pub fn clear(&mut self) -> Vec<T> {
        (self.sent, self.first, self.met) = (0, 1, false);
        self.entries.drain(..).filter_map(|entry| entry.owner).collect()
    }

    fn unsend(&mut self) {
        self.sent = 0;
        self.entries.retain(|entry| entry.owner.is_some());
    }
}

#[cfg(test)]
mod tests {
    //! Goal: in order, each once, whatever breaks and whenever. Method: random steps of a sender, a receiver with a small
    //! queue, a channel between them that breaks, and owners that give up; the receiver's list is the oracle.
    use super::*;
    use proptest::prelude::*;

    enum Up {
        Notify(u64, u32),
    }

    enum Down {
        Resume(u64),
        Taken(u64),
        Full(u64),
        Room,
    }

    #[derive(Default)]
    struct World {
        up: VecDeque<Up>,
        down: VecDeque<Down>,
        standing: bool,
        /// The receiver: how far it took, what waits for its user, what its user got, whether it owes a `Room`.
        taken: u64,
        queue: Vec<u32>,
        got: Vec<u32>,
        owes: bool,
        delivered: Vec<u32>,
        abandoned: Vec<u32>,
    }

    impl World {
        fn step(&mut self, outbox: &mut Outbox<u32>, choice: u8, pushed: &mut u32) {
            match choice % 8 {
                0 => {
                    *pushed += 1;
                    outbox.push(*pushed, pushed.to_le_bytes().to_vec());
                }
                1 | 2 => {
                    if let Some((number, payload)) = outbox.next() {
                        self.up.push_back(Up::Notify(number, u32::from_le_bytes(payload.try_into().expect("4 bytes"))));
                        outbox.sent();
                    }
                }
                3 => {
                    if let Some(Up::Notify(number, item)) = self.up.pop_front() {
                        if number == self.taken + 1 && self.queue.len() < 2 {
                            self.taken += 1;
                            self.queue.push(item);
                            self.down.push_back(Down::Taken(self.taken));
                        } else if number == self.taken + 1 {
                            self.owes = true;
                            self.down.push_back(Down::Full(self.taken));
                        }
                    }
                }
                4 => {
                    self.got.append(&mut self.queue);
                    if std::mem::take(&mut self.owes) && self.standing {
                        self.down.push_back(Down::Room);
                    }
                }
                5 => {
                    let told = match self.down.pop_front() {
                        Some(Down::Resume(through)) => outbox.resume(through),
                        Some(Down::Taken(through)) => outbox.taken(through),
                        Some(Down::Full(through)) => outbox.full(through),
                        Some(Down::Room) => {
                            outbox.room();
                            Ok(vec![])
                        }
                        None => Ok(vec![]),
                    };
                    self.delivered.extend(told.expect("an honest receiver"));
                }
                6 if choice > 200 => {
                    self.up.clear();
                    self.down.clear();
                    self.owes = false;
                    self.standing = !self.standing;
                    outbox.interrupted();
                    if self.standing {
                        self.down.push_back(Down::Resume(self.taken));
                    }
                }
                7 if choice > 200 && *pushed > 0 => {
                    let owner = *pushed - u32::from(choice % 3).min(*pushed - 1);
                    if !self.delivered.contains(&owner) && !self.abandoned.contains(&owner) && outbox.abandon(owner) {
                        self.abandoned.push(owner);
                    }
                }
                _ => {}
            }
        }
    }

    proptest! {
        #[test]
        fn each_once_and_in_order(choices in prop::collection::vec(any::<u8>(), 0..600)) {
            let (mut world, mut outbox, mut pushed) = (World::default(), Outbox::new(), 0);
            for choice in choices {
                world.step(&mut outbox, choice, &mut pushed);
            }
            // Let it end: a session, and everybody does his part.
            if !world.standing {
                world.step(&mut outbox, 206, &mut pushed);
            }
            for _ in 0..4000 {
                for choice in [1, 3, 4, 5] {
                    world.step(&mut outbox, choice, &mut pushed);
                }
            }
            world.got.append(&mut world.queue);
            prop_assert!(world.got.is_sorted_by(|a, b| a < b), "order or twice: {:?}", world.got);
            prop_assert!(world.delivered.iter().all(|item| world.got.contains(item)), "told and not delivered");
            for item in 1..=pushed {
                let ended = u8::from(world.delivered.contains(&item)) + u8::from(world.abandoned.contains(&item));
                prop_assert_eq!(ended, 1, "item {} ended {} times", item, ended);
            }
            prop_assert!(outbox.entries.is_empty());
        }
    }

    #[test]
    fn nonsense_is_noticed() {
        let mut outbox = Outbox::new();
        outbox.push(1, vec![]);
        assert_eq!(outbox.resume(u64::MAX), Err(Nonsense));
        assert_eq!(outbox.resume(4), Ok(vec![]), "an earlier connection has sent four");
        assert_eq!(outbox.next(), Some((5, &[][..])));
        assert_eq!(outbox.taken(5), Err(Nonsense), "it was not sent");
        assert_eq!(outbox.resume(5), Err(Nonsense), "it was not sent");
        outbox.sent();
        assert_eq!(outbox.taken(u64::MAX - 1), Err(Nonsense));
        assert_eq!(outbox.taken(5), Ok(vec![1]));
    }
}
