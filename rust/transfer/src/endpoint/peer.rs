//! What this engine knows of one peer: the session it has dialled, and the transfers to it.
//!
//! ```text
//!            dial                 Established                  drive ends
//!  connect -------> dialling ------------------> standing ------------------> dialling again, 50 ms … 1 s apart,
//!                      | the first one failed       |                         until the handle is dropped
//!                      v                            | another incarnation than before:
//!                    error                          v transfers to the old one are fenced
//!
//!  a transfer:  moving (in the driver) --- Done, and it has a notification ---> notifying (in the outbox) ---> over
//! ```

use std::collections::{BTreeSet, HashMap};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, poll};

use crate::endpoint::handle::RegionHandle;
use crate::endpoint::inbox::say;
use crate::endpoint::outbox::{Nonsense, Outbox};
use crate::endpoint::transfer::State as TransferState;
use crate::endpoint::{Busy, Peer, Shared};
use crate::error::Error;
use crate::link::{Connection, DIAL_WITHIN, Link, Stream, dial_tcp, nonce, now};
use crate::mailbox::poll_timeout;
use crate::messages::{EngineMessage, Purpose, RegionInfo};
use crate::mover::{Ended, Failure, Progress, TransferId, Via};
use crate::session::{Ended as SessionEnded, Event, Session};
use crate::tls::Side;
use crate::types::{Incarnation, Nanos, NodeAddress};
use crate::wire;

/// Between two attempts to reach a peer again: from, to.
const REDIAL: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));
/// A notification without a deadline is given up when its peer has been away for so long.
const NOTIFY_PATIENCE: Duration = Duration::from_secs(10);
/// Transfers with a notification that may stand per peer: 64 MiB of the longest ones.
const NOTIFY_LIMIT: usize = 1024;
/// Questions that may wait for an answer.
const FIND_LIMIT: usize = 1024;

/// One peer. Lock order: this state, then nothing but links; never the driver's lock under it.
pub(super) struct Remote {
    /// Where it is dialled.
    pub address: String,
    pub via: Via,
    /// Tells it from others that lead to the same peer.
    pub number: u64,
    pub link: Link,
    state: Mutex<State>,
    changed: Condvar,
    /// The last transfer had to take another path than the best.
    fallback: AtomicBool,
}

struct State {
    /// The latest life that answered.
    node: Option<NodeAddress>,
    standing: bool,
    /// Why it does not stand.
    down: Option<Error>,
    lost: Nanos,
    closed: bool,
    tickets: u64,
    finds: HashMap<u64, Answer>,
    pending: HashMap<u64, Pending>,
    outbox: Outbox<u64>,
    /// Transfers with a notification.
    notifying: usize,
    /// Deadlines of transfers with a notification.
    due: BTreeSet<(Nanos, u64)>,
    /// Those whose notification was under way when they were to end.
    ending: Vec<u64>,
}

enum Answer {
    Awaited,
    Found(Option<RegionInfo>),
    Lost,
}

/// A transfer that has not ended.
struct Pending {
    transfer: Arc<TransferState>,
    /// Keeps the connection while the transfer lasts. So a `Pending` is never dropped under the lock.
    _peer: Peer,
    /// The life of the peer that it goes to.
    life: Incarnation,
    id: Option<TransferId>,
    notifies: bool,
    payload: Option<Vec<u8>>,
    deadline: Option<Nanos>,
    /// The data are there: how.
    moved: Option<Ended>,
    /// How it ends unless it is done before.
    wanted: Option<Ended>,
}

/// What is needed to begin a transfer.
pub(super) struct Beginning {
    pub peer: Peer,
    pub transfer: Arc<TransferState>,
    pub payload: Option<Vec<u8>>,
    pub deadline: Option<Nanos>,
}

impl Remote {
    pub fn new(address: &str, via: Via, number: u64) -> Result<Arc<Self>, Error> {
        let state = State {
            node: None,
            standing: false,
            down: None,
            lost: 0,
            closed: false,
            tickets: 0,
            finds: HashMap::new(),
            pending: HashMap::new(),
            outbox: Outbox::new(),
            notifying: 0,
            due: BTreeSet::new(),
            ending: Vec::new(),
        };
        let (state, changed, fallback) = (Mutex::new(state), Condvar::new(), AtomicBool::new(false));
        Ok(Arc::new(Self { address: address.into(), via, number, link: Link::new()?, state, changed, fallback }))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Books of this peer alone, and no code under the lock panics but by a bug.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The latest life that answered.
    pub fn node(&self) -> Option<NodeAddress> {
        self.lock().node.clone()
    }

    /// True once it was closed.
    pub fn is_closed(&self) -> bool {
        self.lock().closed
    }

    /// Notes whether a transfer had to take another path than the best; true if that is news.
    pub fn fell_back(&self, fallback: bool) -> bool {
        !self.fallback.swap(fallback, Ordering::Relaxed) && fallback
    }

    /// Why there is no session, if there is none.
    pub fn down(&self) -> Option<Error> {
        let state = self.lock();
        if state.standing { None } else { Some(state.down.clone().unwrap_or_else(|| Error::retry("dialling"))) }
    }

    /// Waits for the first session.
    pub fn met(&self, until: Instant) -> Result<NodeAddress, Error> {
        let mut state = self.lock();
        loop {
            if let Some(node) = &state.node {
                return Ok(node.clone());
            }
            if let Some(error) = &state.down {
                return Err(error.clone());
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Error::retry(format!("{} does not answer", self.address)));
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Asks for the region of this name.
    pub fn find(&self, name: &str, within: Duration) -> Result<RegionHandle, Error> {
        self.ask(name, within)?.ok_or_else(|| {
            let node = self.node().map_or_else(|| self.address.clone(), |node| node.node);
            Error::retry(format!("{node} has no region {name:?} (yet): it registers one by `name`"))
        })
    }

    /// Asks whether there is a region of this name.
    pub fn ask(&self, name: &str, within: Duration) -> Result<Option<RegionHandle>, Error> {
        let until = Instant::now() + within;
        let mut state = self.lock();
        let ticket = state.tickets;
        state.tickets += 1;
        if state.finds.len() >= FIND_LIMIT {
            return Err(Error::retry(format!("{FIND_LIMIT} questions wait for {} already", self.address)));
        }
        let mut asked = false;
        let result = loop {
            if state.closed {
                break Err(Error::bug(format!("the connection to {} was closed", self.address)));
            }
            match state.finds.get(&ticket) {
                // Of the life that `node` tells: the end of a session turns all answers into lost ones.
                Some(Answer::Found(found)) => {
                    let found = *found;
                    let node = state.node.clone().unwrap_or_else(|| unreachable!("a peer that has answered"));
                    break Ok(found.map(|info| RegionHandle::of(&node, info)));
                }
                Some(Answer::Lost) => asked = false,
                Some(Answer::Awaited) | None => {}
            }
            if !asked && state.standing {
                say(&self.link, &EngineMessage::Find { ticket, name: name.into() });
                state.finds.insert(ticket, Answer::Awaited);
                asked = true;
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let why = state.down.clone().map_or_else(String::new, |error| format!(": {error}"));
                break Err(Error::retry(format!("{} did not say where {name:?} is{why}", self.address)));
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        };
        state.finds.remove(&ticket);
        result
    }

    // -- transfers ---------------------------------------------------------------------------------------------------

    /// Enters a transfer into the books. Its end will be told to its state.
    pub fn begin(&self, beginning: Beginning) -> Result<NodeAddress, Busy> {
        let Beginning { peer, transfer, payload, deadline } = beginning;
        let mut state = self.lock();
        if state.closed {
            return Err(Busy::Error(Error::bug(format!("the connection to {} was closed", self.address))));
        }
        let Some(life) = state.node.clone() else { return Err(Busy::Error(Error::retry("not connected yet"))) };
        if payload.is_some() {
            if state.notifying >= NOTIFY_LIMIT {
                return Err(Busy::Full(format!(
                    "{NOTIFY_LIMIT} notifications wait for {} already: wait for one to be taken",
                    life.node
                )));
            }
            state.notifying += 1;
            if let Some(deadline) = deadline {
                state.due.insert((deadline, transfer.number));
            }
        }
        let notifies = payload.is_some();
        let number = transfer.number;
        let pending = Pending {
            transfer,
            _peer: peer,
            life: life.incarnation,
            id: None,
            notifies,
            payload,
            deadline,
            moved: None,
            wanted: None,
        };
        state.pending.insert(number, pending);
        Ok(life)
    }

    /// It was not begun after all: nobody is told.
    pub fn unbegin(&self, number: u64) {
        let pending = self.lock().take(number);
        drop(pending);
    }

    /// Its number in the driver. True if it was to end meanwhile.
    pub fn begun(&self, number: u64, id: TransferId) -> bool {
        let mut state = self.lock();
        state.pending.get_mut(&number).is_some_and(|pending| {
            pending.id = Some(id);
            pending.wanted.is_some()
        })
    }

    /// The driver is done with a transfer.
    pub fn moved(&self, number: u64, ended: Ended) {
        let mut guard = self.lock();
        let state = &mut *guard;
        let Some(pending) = state.pending.get_mut(&number) else { return };
        let (payload, wanted) = (pending.payload.take(), pending.wanted.clone());
        let (Some(payload), Ended::Done { .. }) = (payload, &ended) else {
            self.finish(guard, number, ended);
            return;
        };
        let copies = pending.transfer.copies;
        let failed = |why, message: &str| Some(Ended::Failed { part: copies, why, message: message.into() });
        let in_vain = if wanted.is_some() {
            // In time for the data, but not for the notification.
            wanted
        } else if state.closed {
            failed(Failure::Unreachable, "the connection was closed before it was notified")
        } else if state.node.as_ref().is_some_and(|node| node.incarnation != pending.life) {
            failed(Failure::Fenced, "the peer restarted before it was notified")
        } else {
            None
        };
        match in_vain {
            Some(ended) => self.finish(guard, number, ended),
            None => {
                pending.moved = Some(ended);
                state.outbox.push(number, payload);
                self.flush(state);
            }
        }
    }

    /// Ends a transfer early. Returns its number in the driver, if that must be told.
    pub fn stop(&self, number: u64, wanted: Ended) -> Option<TransferId> {
        let mut state = self.lock();
        let pending = state.pending.get_mut(&number)?;
        pending.wanted.get_or_insert(wanted);
        if pending.moved.is_none() {
            return pending.id;
        }
        if !state.ending.contains(&number) {
            state.ending.push(number);
        }
        self.settle(state);
        None
    }

    /// Its number in the driver, and whether its data are all there.
    pub fn progress(&self, number: u64) -> Option<(Option<TransferId>, Option<Progress>)> {
        let state = self.lock();
        let pending = state.pending.get(&number)?;
        let bytes = pending.transfer.bytes;
        Some((pending.id, pending.moved.is_some().then_some(Progress { bytes_done: bytes, bytes })))
    }

    /// Transfers that have not ended.
    pub fn pending(&self) -> usize {
        self.lock().pending.len()
    }

    /// Ends notifications whose time is over; returns when the next one's is.
    pub fn expire(&self, now: Nanos) -> Option<Nanos> {
        let mut state = self.lock();
        while let Some(&(at, number)) = state.due.first().filter(|(at, _)| *at <= now) {
            state.due.remove(&(at, number));
            if let Some(pending) = state.pending.get_mut(&number) {
                // While its data move, the mover minds the deadline; what is wanted then counts for the notification.
                pending.wanted.get_or_insert(Ended::DeadlinePassed);
                if pending.moved.is_some() {
                    state.ending.push(number);
                }
            }
        }
        let next = state.due.first().map(|(at, _)| *at);
        self.settle(state);
        next
    }

    /// Ends those that were waiting for an answer about their notification, if that is decided now.
    fn settle(&self, mut state: MutexGuard<'_, State>) {
        let mut over: Vec<Pending> = Vec::new();
        for number in std::mem::take(&mut state.ending) {
            if state.outbox.abandon(number) {
                over.extend(state.take(number));
            } else {
                state.ending.push(number);
            }
        }
        drop(state);
        for pending in over {
            pending.transfer.end(pending.wanted.clone().unwrap_or(Ended::Cancelled));
        }
    }

    fn finish(&self, mut state: MutexGuard<'_, State>, number: u64, ended: Ended) {
        let pending = state.take(number);
        drop(state);
        if let Some(pending) = pending {
            pending.transfer.end(ended);
        }
    }

    /// Sends what may be sent.
    fn flush(&self, state: &mut State) {
        while let Some((number, payload)) = state.outbox.next() {
            say(&self.link, &EngineMessage::Notify { number, payload: payload.to_vec() });
            state.outbox.sent();
        }
    }

    /// These notifications were taken.
    fn delivered(&self, mut state: MutexGuard<'_, State>, numbers: Vec<u64>) {
        let pending: Vec<Pending> = numbers.into_iter().filter_map(|number| state.take(number)).collect();
        self.flush(&mut state);
        self.settle(state);
        for pending in pending {
            // It was queued when its data had moved, and not before.
            pending.transfer.end(pending.moved.clone().unwrap_or(Ended::Cancelled));
        }
    }

    /// Fails all notifications that wait.
    fn fail_notifications(&self, mut state: MutexGuard<'_, State>, numbers: Vec<u64>, why: Failure, message: &str) {
        let pending: Vec<Pending> = numbers.into_iter().filter_map(|number| state.take(number)).collect();
        drop(state);
        for pending in pending {
            let failed = Ended::Failed { part: pending.transfer.copies, why, message: message.into() };
            pending.transfer.end(pending.wanted.clone().unwrap_or(failed));
        }
    }

    // -- the session -------------------------------------------------------------------------------------------------

    /// The thread: keeps a session until the link is closed.
    pub fn run(self: &Arc<Self>, shared: &Arc<Shared>) {
        let mut pause = REDIAL.0;
        while !self.link.is_closed() {
            let error = self.session(shared, &mut pause);
            let mut state = self.lock();
            if state.standing {
                tracing::info!(peer = %self.address, "the session ended: {error}");
                state.lost = now();
            } else {
                tracing::debug!(peer = %self.address, "no session: {error}");
            }
            state.standing = false;
            state.down = Some(error);
            state.outbox.interrupted();
            state.finds.values_mut().for_each(|answer| *answer = Answer::Lost);
            self.changed.notify_all();
            if state.node.is_none() {
                // It never answered: whoever connects is told, and may try again.
                return;
            }
            if now().saturating_sub(state.lost) > NOTIFY_PATIENCE.as_nanos() as u64 {
                let numbers = state.outbox.give_up();
                self.fail_notifications(
                    state,
                    numbers,
                    Failure::Unreachable,
                    "the data were applied, but the peer has been away since: whether it was notified is not known",
                );
            } else {
                self.settle(state);
            }
            self.link.wake().clear();
            if !self.link.is_closed() {
                let mut wait = [PollFd::new(self.link.wake().as_fd(), PollFlags::POLLIN)];
                // An error here is an interrupted call: the pause is only shorter.
                let _ = poll(&mut wait, poll_timeout(Some(pause)));
            }
            pause = (pause * 2).min(REDIAL.1);
        }
    }

    fn session(self: &Arc<Self>, shared: &Arc<Shared>, pause: &mut Duration) -> Error {
        let (mut connection, found) = match self.dial(shared) {
            Ok(found) => found,
            Err(error) => return error,
        };
        if let Err(error) = self.stands(shared, found) {
            return error;
        }
        *pause = REDIAL.0;
        connection
            .drive(|payload, _| {
                let message: EngineMessage = wire::decode(&payload)?;
                self.heard(message).map_err(|Nonsense| SessionEnded::Closed("it acknowledged what was not sent".into()))
            })
            .into()
    }

    fn dial(&self, shared: &Shared) -> Result<(Connection, NodeAddress), Error> {
        let stream = dial_tcp(&self.address, &self.link, DIAL_WITHIN).map_err(|error| {
            Error::retry(format!("cannot reach {}: {error}; is its engine running and listening there?", self.address))
        })?;
        let session = Session::dial(shared.key, Purpose::Engine { node: shared.me.clone() }, nonce()?, now());
        let stream = Stream::Tcp(stream).secured(shared.tls, Side::Dialler)?;
        let mut connection = Connection::new(stream, session, self.link.clone())?;
        let context = |error: Error| Error { message: format!("{}: {error}", self.address), ..error };
        match connection.handshake().map_err(|ended| context(ended.into()))? {
            Event::Established(found) => Ok((connection, found)),
            event => Err(Error::bug(format!("{event:?} on a dialled session"))),
        }
    }

    /// A session stands: with the life we knew, or with a new one.
    fn stands(&self, shared: &Shared, found: NodeAddress) -> Result<(), Error> {
        // What the peer says of its own address may be what it listens at inside; we got here by this one.
        let found = NodeAddress { address: self.address.clone(), ..found };
        if found.node == shared.me.node {
            return Err(Error::bug(format!(
                "{} is this engine itself, or has its node id: give each its own",
                found.node
            )));
        }
        let known = self.node();
        let mut restarted = false;
        if let Some(known) = &known {
            if known.node != found.node {
                return Err(Error::retry(format!("{} is {} now, not {}", self.address, found.node, known.node)));
            }
            if found.incarnation < known.incarnation {
                return Err(Error::retry(format!("{} answers in an older life", found.node)));
            }
            restarted = found.incarnation != known.incarnation;
        }
        if restarted {
            tracing::warn!(peer = %found.node, "restarted: its regions of before are gone");
            // Ends what was meant for the life before as fenced.
            shared.driver.connect(&found, self.via, self.number);
        }
        let mut state = self.lock();
        if state.closed {
            drop(state);
            shared.driver.disconnect(&found.node, self.number);
            return Err(Error::retry("closed"));
        }
        let notified = if restarted { state.outbox.clear() } else { Vec::new() };
        // What was queued for the session before must not be said on this one.
        self.link.forget();
        (state.node, state.standing, state.down) = (Some(found), true, None);
        self.changed.notify_all();
        self.fail_notifications(state, notified, Failure::Fenced, "the peer restarted before it was notified");
        Ok(())
    }

    fn heard(&self, message: EngineMessage) -> Result<(), Nonsense> {
        let mut state = self.lock();
        match message {
            EngineMessage::Resume { through } => {
                let taken = state.outbox.resume(through)?;
                self.delivered(state, taken);
            }
            EngineMessage::Taken { through } => {
                let taken = state.outbox.taken(through)?;
                self.delivered(state, taken);
            }
            EngineMessage::Full { through } => {
                let taken = state.outbox.full(through)?;
                self.delivered(state, taken);
            }
            EngineMessage::Room => {
                state.outbox.room();
                self.flush(&mut state);
            }
            EngineMessage::Found { ticket, region } => {
                if let Some(answer) = state.finds.get_mut(&ticket) {
                    *answer = Answer::Found(region);
                    self.changed.notify_all();
                }
            }
            EngineMessage::Find { .. } | EngineMessage::Notify { .. } => return Err(Nonsense),
        }
        Ok(())
    }

    /// No new transfers, and the session ends. Returns the peer, whose paths the caller closes.
    pub fn close(&self, reason: &str) -> Option<NodeAddress> {
        let mut state = self.lock();
        state.closed = true;
        self.link.close(reason);
        self.changed.notify_all();
        let numbers = state.outbox.clear();
        let node = state.node.clone();
        self.fail_notifications(
            state,
            numbers,
            Failure::Unreachable,
            "the connection was closed before it was notified",
        );
        node
    }
}

impl State {
    /// Takes a transfer out of the books.
    fn take(&mut self, number: u64) -> Option<Pending> {
        let pending = self.pending.remove(&number)?;
        if pending.notifies {
            self.notifying -= 1;
            if let Some(deadline) = pending.deadline {
                self.due.remove(&(deadline, number));
            }
        }
        Some(pending)
    }
}

#[cfg(test)]
mod tests {
    //! Goal: what happens between two steps of the session's thread is not lost, and nothing told of one life reaches the
    //! next. Method: real engines; the test takes the part of the driver or of the thread at the moment in question.
    use std::sync::mpsc;

    use super::*;
    use crate::endpoint::{Endpoint, Settings};
    use crate::server::{Listener, Threads, accept_all};
    use crate::transport::Kind;
    use crate::types::RegionId;

    const PATIENCE: Duration = Duration::from_secs(60);

    fn engine(node: &str, listen: &str) -> Endpoint {
        let settings = Settings { node: Some(node.into()), listen: Some(listen.into()), ..Settings::default() };
        Endpoint::start(settings).expect("starts")
    }

    fn connect(from: &Endpoint, to: &Endpoint) -> Peer {
        from.connect(&to.address().address, Via::Auto, PATIENCE).expect("reachable")
    }

    /// A transfer with a notification whose data move.
    fn moving(peer: &Peer) -> Arc<TransferState> {
        let transfer = TransferState::new(1 << 40, 1, 1);
        let beginning =
            Beginning { peer: peer.clone(), transfer: transfer.clone(), payload: Some(vec![1]), deadline: None };
        assert!(peer.0.remote.begin(beginning).is_ok());
        transfer
    }

    fn done() -> Ended {
        Ended::Done { via: Kind::Tcp, fallback: false, retries: 0 }
    }

    fn failure(transfer: &TransferState) -> Option<Failure> {
        match transfer.outcome() {
            Some(Ended::Failed { why, .. }) => Some(why),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn data_that_have_moved_when_the_peer_is_closed_are_not_forgotten() {
        let (a, b) = (engine("a", "127.0.0.1:0"), engine("b", "127.0.0.1:0"));
        let peer = connect(&a, &b);
        let transfer = moving(&peer);
        peer.0.remote.close("closed");
        peer.0.remote.moved(transfer.number, done());
        assert_eq!(failure(&transfer), Some(Failure::Unreachable));
    }

    #[test]
    fn data_that_have_moved_to_the_life_before_notify_nobody() {
        let (a, b) = (engine("a", "127.0.0.1:0"), engine("b", "127.0.0.1:0"));
        let peer = connect(&a, &b);
        let (transfer, life) = (moving(&peer), peer.address());
        drop(b);
        let restarted = engine("b", &life.address);
        // It answers, so it is reached in its new life.
        assert!(peer.find("nothing", PATIENCE).is_err() && peer.address().incarnation != life.incarnation);
        peer.0.remote.moved(transfer.number, done());
        assert_eq!(failure(&transfer), Some(Failure::Fenced));
        assert!(!restarted.wait_notification(Duration::from_millis(50)));
    }

    #[test]
    fn a_question_that_was_lost_is_asked_again() {
        // An engine that hears questions and answers the second.
        let (listener, at) = Listener::tcp("127.0.0.1:0").expect("binds");
        let me = NodeAddress { node: "b".into(), address: at.to_string(), incarnation: 1 };
        let (threads, until) = (Arc::new(Threads::default()), Link::new().expect("an eventfd"));
        let (heard, questions) = mpsc::channel();
        let (all, stop, node) = (threads.clone(), until.clone(), me.clone());
        let accept = move || {
            accept_all(&[listener], &stop, |stream| {
                let (link, node, heard) = (Link::new().expect("an eventfd"), node.clone(), heard.clone());
                let (within, mut asked) = (link.clone(), 0);
                let serve = move || {
                    let key = crate::config::open_key();
                    let session = Session::accept(key, node, nonce().expect("random"), now());
                    let mut connection = Connection::new(stream, session, within.clone()).expect("a socket");
                    connection.handshake().expect("it knows the key");
                    connection.welcome();
                    connection.drive(|payload, _| {
                        if let Ok(EngineMessage::Find { ticket, .. }) = wire::decode(&payload) {
                            asked += 1;
                            let region = RegionId(asked);
                            let info = RegionInfo { region, bytes: 1, grain: 0, read: true, write: true };
                            if asked == 2 {
                                say(&within, &EngineMessage::Found { ticket, region: Some(info) });
                            }
                            heard.send(asked).expect("the test listens");
                        }
                        Ok(())
                    });
                };
                all.spawn("answers", &link, serve).expect("not stopping");
            });
        };
        threads.spawn("accept", &until, accept).expect("starts");
        let a = engine("a", "127.0.0.1:0");
        let remote = Remote::new(&me.address, Via::Auto, 1).expect("an eventfd");
        let (at, to) = (a.shared.clone(), remote.clone());
        a.threads.spawn("peer", &remote.link, move || to.run(&at)).expect("starts");
        remote.met(Instant::now() + PATIENCE).expect("it answers");
        std::thread::scope(|scope| {
            let asking = scope.spawn(|| remote.find("it", PATIENCE));
            assert_eq!(questions.recv_timeout(PATIENCE), Ok(1));
            // The session was lost and stands again before the asker had a chance to look.
            remote.lock().finds.values_mut().for_each(|answer| *answer = Answer::Lost);
            remote.changed.notify_all();
            assert_eq!(questions.recv_timeout(PATIENCE), Ok(2));
            assert_eq!(asking.join().expect("no panic").expect("answered").region, RegionId(2));
        });
        remote.close("over");
        until.close("over");
        threads.stop("over");
    }
}
