//! Notifications from peers: a bounded queue for the user, and how far each peer's were taken.

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, poll};

use crate::error::Error;
use crate::link::Link;
use crate::mailbox::{Wake, poll_timeout};
use crate::messages::EngineMessage;
use crate::types::{Incarnation, NodeAddress, NodeId};
use crate::wire;

/// Peers whose count is kept while they have no session: what one forgets could be taken twice.
const SENDERS: usize = 1 << 12;

/// A few bytes that a peer has sent, after the data of its transfer were applied here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notification {
    /// Who has sent it.
    pub from: NodeAddress,
    /// What.
    pub payload: Vec<u8>,
}

/// The queue.
pub(super) struct Inbox {
    state: Mutex<State>,
    wake: Wake,
    limit: usize,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Notification>,
    senders: HashMap<NodeId, Sender>,
    /// Who was refused, and is to be told of room.
    owed: Vec<Link>,
    closed: bool,
}

struct Sender {
    life: Incarnation,
    taken: u64,
    /// The session that counts.
    session: Option<(u64, Link)>,
}

impl Inbox {
    pub fn new(limit: usize) -> Result<Self, Error> {
        Ok(Self { state: Mutex::default(), wake: Wake::new()?, limit: limit.max(1) })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // No code that could panic runs under the lock, so a poisoned state is still whole.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A peer has a session; it replaces an earlier one. It is told how far its notifications were taken.
    pub fn enter(&self, number: u64, peer: &NodeAddress, link: &Link) {
        let mut state = self.lock();
        if state.senders.len() >= SENDERS && !state.senders.contains_key(&peer.node) {
            state.senders.retain(|_, sender| sender.session.is_some());
        }
        let sender = state.senders.entry(peer.node.clone()).or_insert(Sender { life: 0, taken: 0, session: None });
        if sender.life != peer.incarnation {
            (sender.life, sender.taken) = (peer.incarnation, 0);
        }
        if let Some((_, old)) = sender.session.replace((number, link.clone())) {
            old.close("the peer has dialled in again");
        }
        say(link, &EngineMessage::Resume { through: sender.taken });
    }

    /// That session is over.
    pub fn leave(&self, number: u64, peer: &NodeId, link: &Link) {
        let mut state = self.lock();
        if let Some(sender) = state.senders.get_mut(peer)
            && sender.session.as_ref().is_some_and(|(current, _)| *current == number)
        {
            sender.session = None;
        }
        state.owed.retain(|owed| !owed.is(link));
    }

    /// A notification on that session. It is answered under the lock, so that `Room` never overtakes `Full`.
    pub fn offer(&self, session: u64, from: &NodeAddress, number: u64, payload: Vec<u8>) {
        let mut state = self.lock();
        let State { queue, senders, owed, closed } = &mut *state;
        let Some(sender) = senders.get_mut(&from.node) else { return };
        let Some((_, link)) = sender.session.as_ref().filter(|(current, _)| *current == session) else { return };
        if number > sender.taken.saturating_add(1) {
            // Behind one that was refused: it comes again.
            return;
        }
        if number == sender.taken + 1 {
            if queue.len() >= self.limit || *closed {
                if !owed.iter().any(|owed| owed.is(link)) {
                    owed.push(link.clone());
                }
                say(link, &EngineMessage::Full { through: sender.taken });
                return;
            }
            sender.taken += 1;
            queue.push_back(Notification { from: from.clone(), payload });
            self.wake.set();
        }
        say(link, &EngineMessage::Taken { through: sender.taken });
    }

    /// Takes what waits, at most so many.
    pub fn take(&self, at_most: usize) -> Vec<Notification> {
        let mut state = self.lock();
        let count = state.queue.len().min(at_most);
        let taken: Vec<Notification> = state.queue.drain(..count).collect();
        if state.queue.is_empty() && !state.closed {
            self.wake.clear();
        }
        if count > 0 {
            state.owed.drain(..).for_each(|link| say(&link, &EngineMessage::Room));
        }
        taken
    }

    /// Waits until something is there; false if the time is over before, or nothing will come any more.
    pub fn wait(&self, timeout: Duration) -> bool {
        let until = Instant::now() + timeout;
        loop {
            {
                let state = self.lock();
                if !state.queue.is_empty() || state.closed {
                    return !state.queue.is_empty();
                }
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            let mut wait = [PollFd::new(self.wake.as_fd(), PollFlags::POLLIN)];
            // An error here is an interrupted call: look again.
            let _ = poll(&mut wait, poll_timeout(Some(left)));
        }
    }

    /// Notifications that wait.
    pub fn len(&self) -> usize {
        self.lock().queue.len()
    }

    /// Nothing comes any more; waiters are woken, and sessions end.
    pub fn close(&self, reason: &str) {
        let mut state = self.lock();
        state.closed = true;
        self.wake.set();
        for sender in state.senders.values_mut() {
            if let Some((_, link)) = sender.session.take() {
                link.close(reason);
            }
        }
    }
}

impl AsFd for Inbox {
    /// Readable while something waits.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}

/// Sends a message, or ends the session of a peer that does not read its answers.
pub(super) fn say(link: &Link, message: &EngineMessage) {
    if link.send(wire::encode(message)).is_err() {
        link.close("the peer does not read");
    }
}
