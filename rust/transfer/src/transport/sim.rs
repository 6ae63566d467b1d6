//! A network in virtual time, for tests: deterministic from its seed, and as unkind as it is told to be.
//!
//! [`Network`] carries copies and implements [`Transport`] for every node that joins it, one per [`Kind`] if wanted, so
//! that there are several paths between two nodes. [`World`] is the twin of `daemon`: it runs whole engines over such a
//! network and carries their control messages, dials and deaths.
//!
//! A copy's life, each arrow a seeded delay; a lane carries one body at a time, and lanes overtake each other:
//!
//! ```text
//! submit ---> begin: the peer's hold is taken ---> end: bytes applied and verified ---> ack: completion
//!        \--- lane or path breaks: Lost, this side is quiet. A write may still be applied late, as bytes lie in
//!             buffers, but never after a copy that was submitted when `Lost` had been told (unless `Faults::late`)
//! ```
//!
//! In a cut network, and on a stalled lane, copies wait where they are; after 3 s path or lane count as broken.

mod world;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::memory::checksum;
use crate::messages::PeerMessage;
pub use crate::random::Random;
use crate::region::{By, Denied, Reading, Regions, Writing, pieces};
use crate::types::{Incarnation, Nanos, NodeAddress, NodeId};

pub use world::World;

use super::{Busy, Completion, Copy, Kind, Op, Outcome, Path, Transport};

const MILLISECOND: Nanos = 1_000_000;
/// A session, path or lane on which nothing moves this long is dead.
const SILENCE: Nanos = 3_000 * MILLISECOND;

/// How unkind the network is.
#[derive(Clone, Copy, Debug)]
pub struct Faults {
    /// Every delay is drawn between 1 ns and this.
    pub delay: Nanos,
    /// Of a thousand copies, how many have a strip corrupted on the way.
    pub corrupt: u64,
    /// Of a thousand copies, how many lose their lane, with all that is on it.
    pub lose: u64,
    /// Of a thousand copies, how many find that their lane has stalled.
    pub stall: u64,
    /// Copies that a path takes before it is `Busy`.
    pub queue: usize,
    /// Lanes of a path.
    pub lanes: usize,
    /// Bytes of a broken lane may arrive after what was sent later. No transport may do that, but pools survive it.
    pub late: bool,
}

impl Default for Faults {
    fn default() -> Self {
        Self { delay: 5 * MILLISECOND, corrupt: 0, lose: 0, stall: 0, queue: 8, lanes: 4, late: false }
    }
}

/// One direction of one path.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Link {
    from: NodeId,
    to: NodeId,
    kind: Kind,
}

/// A copy under way.
struct Flight {
    link: Link,
    /// The lives of both ends.
    from: Incarnation,
    to: NodeAddress,
    lane: usize,
    submitted: Nanos,
    /// How long its body takes.
    body: Nanos,
    copy: Copy,
    stage: Stage,
    local: Option<Hold>,
    remote: Option<Hold>,
    /// What is in the network's buffers, if it is not read from a hold.
    bytes: Option<Vec<u8>>,
    sums: Vec<u32>,
    sabotage: Option<Sabotage>,
    /// It was (or will be) told then that it is lost; nobody waits for the outcome.
    orphan: Option<Nanos>,
    /// It waits for the path, or for a lane that has stalled.
    parked: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Begin,
    End,
    Ack(Outcome),
}

enum Hold {
    Reading(Reading),
    Writing(Writing),
}

#[derive(Clone, Copy)]
enum Sabotage {
    /// One bit of one strip flips on the way.
    Corrupt,
    /// One strip is not written, and yet the copy says `Done`.
    DropStrip,
    /// The lane breaks.
    Lose,
    /// The lane stalls.
    Stall,
}

enum Event {
    /// A copy reaches its next stage.
    Go(u64),
    /// A node is told what became of a copy.
    Told {
        node: NodeId,
        life: Incarnation,
        kind: Kind,
        completion: Completion,
    },
    /// An attempt at a path gets through to the peer.
    Connected {
        link: Link,
        attempt: u64,
    },
    /// An attempt at a path has taken too long.
    Expired {
        link: Link,
        attempt: u64,
    },
    /// The peer's death shows.
    Reset {
        link: Link,
        attempt: u64,
    },
    /// Nothing has moved for long, on a path or on one lane of it.
    Silent {
        link: Link,
        silence: u64,
        lane: Option<usize>,
    },
    Control(Control),
}

/// What has happened.
enum Step {
    Nothing,
    /// A copy went on.
    Copied,
    /// This node has completions, or a path of it has changed.
    Completed(NodeId),
    /// For the [`World`] to do.
    Control(Control),
}

/// What a [`World`] does when its time has come.
enum Control {
    Up {
        at: NodeId,
        peer: NodeAddress,
        session: u64,
    },
    Down {
        at: NodeId,
        peer: NodeAddress,
    },
    Message {
        at: NodeId,
        from: NodeId,
        session: u64,
        message: PeerMessage,
    },
    Dialled {
        by: NodeAddress,
        peer: NodeAddress,
    },
    Silent {
        session: u64,
    },
    Look {
        at: NodeId,
    },
    /// A node's tier has something to do or to tell.
    Tier {
        at: NodeId,
    },
    Tick,
}

#[derive(Default)]
struct Life {
    incarnation: Incarnation,
    regions: Option<Arc<Regions>>,
    completions: BTreeMap<Kind, Vec<Completion>>,
}

/// A path, as the node sees it that asked for it.
struct End {
    peer: NodeAddress,
    attempt: u64,
    state: Path,
    lanes: Vec<Lane>,
    /// Copies wait since nothing comes through; the number tells one silence from the next.
    silence: Option<u64>,
}

#[derive(Clone, Copy, Default)]
struct Lane {
    /// When the last body that was given to it will have ended.
    free: Nanos,
    stalled: Option<u64>,
}

struct Inner {
    random: Random,
    faults: Faults,
    now: Nanos,
    next: u64,
    events: BTreeMap<(Nanos, u64), Event>,
    lives: BTreeMap<NodeId, Life>,
    ends: BTreeMap<Link, End>,
    flights: BTreeMap<u64, Flight>,
    /// Those of a link that its owner waits for.
    waited_for: BTreeMap<Link, BTreeSet<u64>>,
    /// Those that nobody waits for.
    orphans: BTreeSet<u64>,
    /// Pairs of nodes between which nothing comes through: by no path (`None`), or by one.
    cut: BTreeSet<(NodeId, NodeId, Option<Kind>)>,
    /// Paths that cannot be made.
    refused: BTreeSet<(NodeId, NodeId, Kind)>,
    sabotage: VecDeque<Sabotage>,
}

impl Inner {
    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn schedule(&mut self, at: Nanos, event: Event) {
        let number = self.number();
        self.events.insert((at, number), event);
    }

    fn soon(&mut self) -> Nanos {
        self.now + 1 + self.random.below(self.faults.delay)
    }

    fn is_cut(&self, a: &NodeId, b: &NodeId, kind: Option<Kind>) -> bool {
        let (a, b) = pair(a, b);
        self.cut.contains(&(a.clone(), b.clone(), None)) || (kind.is_some() && self.cut.contains(&(a, b, kind)))
    }

    fn alive(&self, node: &NodeAddress) -> bool {
        self.lives.get(&node.node).is_some_and(|life| life.incarnation == node.incarnation)
    }

    /// Copies that a link's owner waits for, in the order of submission.
    fn waited_for(&self, link: &Link) -> Vec<u64> {
        self.waited_for.get(link).into_iter().flatten().copied().collect()
    }

    /// The end of a copy, as far as the network is concerned.
    fn remove(&mut self, id: u64) -> Option<Flight> {
        let flight = self.flights.remove(&id)?;
        self.orphans.remove(&id);
        if let Some(waited_for) = self.waited_for.get_mut(&flight.link) {
            waited_for.remove(&id);
        }
        Some(flight)
    }

    /// Removes those orphans that satisfy `which`.
    fn remove_orphans(&mut self, which: impl Fn(&Flight) -> bool) {
        let doomed: Vec<u64> = self.orphans.iter().copied().filter(|id| which(&self.flights[id])).collect();
        doomed.into_iter().for_each(|id| drop(self.remove(id)));
    }

    // -- paths -------------------------------------------------------------------------------------------------------

    fn connect(&mut self, link: Link, peer: &NodeAddress) {
        if let Some(end) = self.ends.get(&link) {
            if end.peer == *peer && !matches!(end.state, Path::Down(_)) {
                return;
            }
            self.close(&link);
        }
        let attempt = self.number();
        let lanes = vec![Lane::default(); self.faults.lanes];
        let end = End { peer: peer.clone(), attempt, state: Path::Connecting, lanes, silence: None };
        self.ends.insert(link.clone(), end);
        let (at, late) = (self.soon(), self.now + SILENCE);
        self.schedule(at, Event::Connected { link: link.clone(), attempt });
        self.schedule(late, Event::Expired { link, attempt });
    }

    /// The link's path, if this attempt at it is the last one.
    fn end_of(&mut self, link: &Link, attempt: u64) -> Option<&mut End> {
        self.ends.get_mut(link).filter(|end| end.attempt == attempt)
    }

    fn connected(&mut self, link: &Link, attempt: u64) {
        let Some(end) = self.end_of(link, attempt).filter(|end| end.state == Path::Connecting) else { return };
        let peer = end.peer.clone();
        let (a, b) = pair(&link.from, &link.to);
        if self.refused.contains(&(a, b, link.kind)) {
            return self.break_path(link, "refused");
        }
        if self.is_cut(&link.from, &link.to, Some(link.kind)) {
            // Healing tries again; else it expires.
            return;
        }
        if !self.alive(&peer) {
            return self.break_path(link, "that life of the peer is over");
        }
        self.ends.get_mut(link).expect("just seen").state = Path::Up;
        self.release(link);
    }

    /// The path is down; what it carried is lost.
    fn break_path(&mut self, link: &Link, why: &str) {
        let Some(end) = self.ends.get_mut(link) else { return };
        end.state = Path::Down(why.into());
        (end.silence, end.attempt) = (None, 0);
        end.lanes.fill(Lane::default());
        for id in self.waited_for(link) {
            let told = self.soon();
            self.lose(id, told);
        }
    }

    fn break_lane(&mut self, link: &Link, lane: usize) {
        if let Some(end) = self.ends.get_mut(link) {
            end.lanes[lane] = Lane { free: self.now, stalled: None };
        }
        for id in self.waited_for(link) {
            if self.flights[&id].lane == lane {
                let told = self.soon();
                self.lose(id, told);
            }
        }
    }

    /// The owner wants the path no more: it is told at once what that costs.
    fn close(&mut self, link: &Link) {
        for id in self.waited_for(link) {
            self.lose(id, self.now);
        }
        self.ends.remove(link);
    }

    /// A copy's lane is gone. This side is quiet from now on; bytes that are on their way may still arrive.
    fn lose(&mut self, id: u64, told: Nanos) {
        let arrives = self.random.permille(500);
        let Some(flight) = self.flights.get_mut(&id) else { return };
        let completion = Completion { id: flight.copy.id, outcome: Outcome::Lost };
        let (node, life, kind) = (flight.link.from.clone(), flight.from, flight.link.kind);
        flight.orphan = Some(told);
        self.orphans.insert(id);
        if let Some(waited_for) = self.waited_for.get_mut(&flight.link) {
            waited_for.remove(&id);
        }
        if let Some(Hold::Reading(held)) = flight.local.take()
            && flight.bytes.is_none()
        {
            flight.bytes = Some(held.bytes().to_vec());
        }
        // A body that is being received ends or breaks off; either way its hold ends with it.
        let on_its_way = flight.copy.op == Op::Write && !matches!(flight.stage, Stage::Ack(_));
        if !(arrives && on_its_way) {
            self.remove(id);
        } else if std::mem::take(&mut flight.parked) {
            let at = self.soon();
            self.schedule(at, Event::Go(id));
        }
        if told == self.now {
            self.tell(&node, life, kind, completion);
        } else {
            self.schedule(told, Event::Told { node, life, kind, completion });
        }
    }

    fn tell(&mut self, node: &NodeId, incarnation: Incarnation, kind: Kind, completion: Completion) {
        if let Some(life) = self.lives.get_mut(node).filter(|life| life.incarnation == incarnation) {
            life.completions.entry(kind).or_default().push(completion);
        }
    }

    /// What has waited for the path goes on, in the order of submission.
    fn release(&mut self, link: &Link) {
        if let Some(end) = self.ends.get_mut(link) {
            end.silence = None;
        }
        for id in self.waited_for(link) {
            let soon = self.soon();
            let (flight, end) = (&self.flights[&id], &self.ends[link]);
            let (lane, body) = (flight.lane, flight.body);
            if !flight.parked || end.lanes[lane].stalled.is_some() {
                continue;
            }
            let at = soon.max(end.lanes[lane].free + 1);
            self.ends.get_mut(link).expect("just seen").lanes[lane].free = at + body;
            self.flights.get_mut(&id).expect("just seen").parked = false;
            self.schedule(at, Event::Go(id));
        }
    }

    /// A copy waits until its path or lane goes on, or counts as broken.
    fn park(&mut self, id: u64, lane: Option<usize>) {
        let silence = self.number();
        let flight = self.flights.get_mut(&id).expect("it is under way");
        flight.parked = true;
        let link = flight.link.clone();
        let Some(end) = self.ends.get_mut(&link) else { return };
        let since = match lane {
            Some(lane) => &mut end.lanes[lane].stalled,
            None => &mut end.silence,
        };
        if since.is_none() {
            *since = Some(silence);
            self.schedule(self.now + SILENCE, Event::Silent { link, silence, lane });
        }
    }

    // -- copies ------------------------------------------------------------------------------------------------------

    fn submit(&mut self, link: &Link, copies: &[Copy]) -> Result<(), Busy> {
        // An empty path takes any number, so that every batch gets through at last.
        let under_way = self.waited_for.get(link).map_or(0, BTreeSet::len);
        if under_way > 0 && under_way + copies.len() > self.faults.queue {
            return Err(Busy);
        }
        for copy in copies {
            self.submit_one(link, copy);
        }
        Ok(())
    }

    fn submit_one(&mut self, link: &Link, copy: &Copy) {
        let Some(Life { incarnation, regions, .. }) = self.lives.get(&link.from) else { return };
        let from = *incarnation;
        let held = match regions {
            None => Err(Denied::Fenced),
            Some(regions) => match copy.op {
                Op::Write => regions.begin_read(copy.local, copy.bytes.into(), By::Owner).map(Hold::Reading),
                Op::Read => regions.begin_write(copy.local, copy.bytes.into(), By::Owner).map(Hold::Writing),
            },
        };
        let up = self.ends.get(link).filter(|end| !matches!(end.state, Path::Down(_)));
        let held = held.map_err(outcome_of).and_then(|held| Ok((held, up.ok_or(Outcome::Lost)?)));
        let (held, end) = match held {
            Ok(both) => both,
            Err(outcome) => {
                let (node, at, kind) = (link.from.clone(), self.soon(), link.kind);
                let completion = Completion { id: copy.id, outcome };
                return self.schedule(at, Event::Told { node, life: from, kind, completion });
            }
        };
        let mut sums = Vec::new();
        if let Hold::Reading(held) = &held {
            held.checksums(copy.grain, &mut sums);
        }
        let (to, parked) = (end.peer.clone(), end.state == Path::Connecting);
        let sabotage = self.sabotage.pop_front().or_else(|| {
            let Faults { corrupt, lose, stall, .. } = self.faults;
            match self.random.below(1000) {
                dice if dice < corrupt => Some(Sabotage::Corrupt),
                dice if dice < corrupt + lose => Some(Sabotage::Lose),
                dice if dice < corrupt + lose + stall => Some(Sabotage::Stall),
                _ => None,
            }
        });
        let (id, lane) = (self.number(), self.random.below(self.faults.lanes as u64) as usize);
        let (soon, body) = (self.soon(), 1 + self.random.below(self.faults.delay));
        let flight = Flight {
            link: link.clone(),
            from,
            to,
            lane,
            submitted: self.now,
            body,
            copy: *copy,
            stage: Stage::Begin,
            local: Some(held),
            remote: None,
            bytes: None,
            sums,
            sabotage,
            orphan: None,
            parked,
        };
        self.flights.insert(id, flight);
        self.waited_for.entry(link.clone()).or_default().insert(id);
        if !parked {
            let lane = &mut self.ends.get_mut(link).expect("just seen").lanes[lane];
            let at = soon.max(lane.free + 1);
            lane.free = at + body;
            self.schedule(at, Event::Go(id));
        }
    }

    /// A copy reaches its next stage, unless something is in the way. Names the node that has something to look at.
    fn go(&mut self, id: u64) -> Option<NodeId> {
        let flight = self.flights.get(&id)?;
        let (link, lane, orphan) = (flight.link.clone(), flight.lane, flight.orphan.is_some());
        let stalled = self.ends.get(&link).is_some_and(|end| end.lanes[lane].stalled.is_some());
        if !orphan && (stalled || self.is_cut(&link.from, &link.to, Some(link.kind))) {
            self.park(id, stalled.then_some(lane));
            return None;
        }
        if let Stage::Ack(outcome) = flight.stage {
            let flight = self.remove(id)?;
            self.tell(&link.from, flight.from, link.kind, Completion { id: flight.copy.id, outcome });
            return Some(link.from);
        }
        if !self.alive(&flight.to) {
            if orphan {
                self.remove(id);
            } else {
                self.break_path(&link, "connection reset");
            }
            return Some(link.from);
        }
        if flight.stage == Stage::End {
            self.end(id);
            return None;
        }
        match flight.sabotage {
            Some(Sabotage::Lose) if !orphan => self.break_lane(&link, lane),
            Some(Sabotage::Stall) if !orphan => {
                self.flights.get_mut(&id)?.sabotage = None;
                self.park(id, Some(lane));
            }
            _ => self.begin(id),
        }
        None
    }

    /// The copy reaches the peer, which takes its memory for it.
    fn begin(&mut self, id: u64) {
        let flight = &self.flights[&id];
        let (copy, body) = (flight.copy, flight.body);
        if flight.orphan.is_none() && !self.faults.late {
            let (link, submitted) = (flight.link.clone(), flight.submitted);
            let fenced = |other: &Flight| {
                let between = other.link.from == link.from && other.link.to == link.to;
                between && other.orphan.is_some_and(|told| told <= submitted)
            };
            self.remove_orphans(fenced);
        }
        let flight = self.flights.get_mut(&id).expect("it is no orphan");
        let held = match self.lives.get(&flight.to.node).and_then(|life| life.regions.as_ref()) {
            None => Err(Denied::Fenced),
            Some(regions) => match copy.op {
                Op::Write => regions.begin_write(copy.remote, copy.bytes.into(), By::Peer).map(Hold::Writing),
                Op::Read => regions.begin_read(copy.remote, copy.bytes.into(), By::Peer).map(Hold::Reading),
            },
        };
        match held {
            Err(denied) => self.answer(id, outcome_of(denied)),
            Ok(Hold::Reading(held)) => {
                held.checksums(copy.grain, &mut flight.sums);
                flight.bytes = Some(held.bytes().to_vec());
                flight.stage = Stage::End;
                self.schedule(self.now + body, Event::Go(id));
            }
            Ok(held) => {
                (flight.remote, flight.stage) = (Some(held), Stage::End);
                self.schedule(self.now + body, Event::Go(id));
            }
        }
    }

    /// The bytes have arrived where they are to lie: each strip is verified and marked.
    fn end(&mut self, id: u64) {
        let flight = self.flights.get_mut(&id).expect("it is under way");
        let (source, sink) = match flight.copy.op {
            Op::Write => (flight.local.take(), flight.remote.take()),
            Op::Read => (None, flight.local.take()),
        };
        let Some(Hold::Writing(mut sink)) = sink else { unreachable!("a sink is taken before its bytes come") };
        let bytes = match (&flight.bytes, &source) {
            (Some(bytes), _) => bytes.as_slice(),
            (None, Some(Hold::Reading(held))) => held.bytes(),
            (None, _) => unreachable!("a source is held, or its bytes are on their way"),
        };
        let victim = self.random.below(flight.sums.len().max(1) as u64) as usize;
        let (grain, sabotage) = (flight.copy.grain, flight.sabotage);
        let drops = matches!(sabotage, Some(Sabotage::DropStrip));
        let mut outcome = Outcome::Done;
        let mut rest = sink.bytes_mut();
        for (index, (bytes, sum)) in pieces(bytes, grain).zip(&flight.sums).enumerate() {
            let (into, behind) = std::mem::take(&mut rest).split_at_mut(bytes.len());
            rest = behind;
            if index == victim && drops {
                continue;
            }
            into.copy_from_slice(bytes);
            if index == victim && matches!(sabotage, Some(Sabotage::Corrupt)) {
                into[0] ^= 1;
            }
            if checksum(into) != *sum {
                outcome = Outcome::Corrupt;
            }
        }
        if outcome == Outcome::Done && !drops {
            sink.finish(grain, &flight.sums);
        }
        self.answer(id, outcome);
    }

    /// The outcome is known where the bytes are to lie, and nobody touches them any more for this copy.
    fn answer(&mut self, id: u64, outcome: Outcome) {
        let at = self.soon();
        let flight = self.flights.get_mut(&id).expect("it is under way");
        if flight.orphan.is_some() {
            self.remove(id);
            return;
        }
        (flight.local, flight.remote, flight.bytes) = (None, None, None);
        flight.stage = Stage::Ack(outcome);
        self.schedule(at, Event::Go(id));
    }

    /// Lets the next event happen.
    fn step(&mut self) -> Step {
        let Some(((at, _), event)) = self.events.pop_first() else { return Step::Nothing };
        self.now = at;
        match event {
            Event::Go(id) => self.go(id).map_or(Step::Copied, Step::Completed),
            Event::Told { node, life, kind, completion } => {
                self.tell(&node, life, kind, completion);
                Step::Completed(node)
            }
            Event::Connected { link, attempt } => {
                self.connected(&link, attempt);
                Step::Completed(link.from)
            }
            Event::Expired { link, attempt } => {
                if self.end_of(&link, attempt).is_some_and(|end| end.state == Path::Connecting) {
                    self.break_path(&link, "connecting took 3 s");
                }
                Step::Completed(link.from)
            }
            Event::Reset { link, attempt } => {
                let comes_through = !self.is_cut(&link.from, &link.to, Some(link.kind));
                if comes_through && self.end_of(&link, attempt).is_some() {
                    self.break_path(&link, "connection reset");
                }
                Step::Completed(link.from)
            }
            Event::Silent { link, silence, lane } => {
                match (lane, self.ends.get(&link)) {
                    (Some(lane), Some(end)) if end.lanes[lane].stalled == Some(silence) => self.break_lane(&link, lane),
                    (None, Some(end)) if end.silence == Some(silence) => {
                        self.break_path(&link, "nothing moved for 3 s");
                    }
                    _ => {}
                }
                Step::Completed(link.from)
            }
            Event::Control(control) => Step::Control(control),
        }
    }
}

fn outcome_of(denied: Denied) -> Outcome {
    match denied {
        Denied::Fenced => Outcome::Fenced,
        Denied::Bounds | Denied::Permission => Outcome::Denied,
    }
}

fn pair(a: &NodeId, b: &NodeId) -> (NodeId, NodeId) {
    if a < b { (a.clone(), b.clone()) } else { (b.clone(), a.clone()) }
}

/// The network. Clones are the same network.
#[derive(Clone)]
pub struct Network(Arc<Mutex<Inner>>);

impl Network {
    /// A network with nobody in it. Same seed, same calls: same behaviour.
    pub fn new(seed: u64, faults: Faults) -> Self {
        Self(Arc::new(Mutex::new(Inner {
            random: Random(seed),
            faults,
            now: 0,
            next: 0,
            events: BTreeMap::new(),
            lives: BTreeMap::new(),
            ends: BTreeMap::new(),
            flights: BTreeMap::new(),
            waited_for: BTreeMap::new(),
            orphans: BTreeSet::new(),
            cut: BTreeSet::new(),
            refused: BTreeSet::new(),
            sabotage: VecDeque::new(),
        })))
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        // Used by one thread in tests; a panic there has failed the test already.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A life of a node joins; an earlier one of the same name is over.
    pub fn join(&self, node: &NodeAddress) -> SimTransport {
        self.leave(&node.node);
        let life = Life { incarnation: node.incarnation, ..Life::default() };
        self.inner().lives.insert(node.node.clone(), life);
        self.transport(node, Kind::Sim)
    }

    /// Another transport of a life that has joined: another path to everybody.
    pub fn transport(&self, node: &NodeAddress, kind: Kind) -> SimTransport {
        SimTransport { node: node.node.clone(), life: node.incarnation, kind, network: self.clone() }
    }

    /// A node dies: its lanes break, and its memory is touched no more.
    pub fn leave(&self, node: &NodeId) {
        let mut inner = self.inner();
        if inner.lives.remove(node).is_none() {
            return;
        }
        let (mine, theirs): (Vec<Link>, Vec<Link>) = inner
            .ends
            .keys()
            .filter(|link| link.from == *node || link.to == *node)
            .cloned()
            .partition(|link| link.from == *node);
        mine.iter().for_each(|link| inner.close(link));
        for link in theirs {
            let (at, attempt) = (inner.soon(), inner.ends[&link].attempt);
            inner.schedule(at, Event::Reset { link, attempt });
        }
        // Bytes on their way to it have nowhere to go.
        inner.remove_orphans(|flight| flight.link.to == *node);
        let mut reaching = inner.flights.values_mut().filter(|flight| flight.link.to == *node);
        reaching.by_ref().for_each(|flight| flight.remote = None);
    }

    /// Nothing comes through between two nodes any more: at all, or by one path.
    pub fn cut(&self, a: &str, b: &str, kind: Option<Kind>) {
        let (a, b) = pair(&a.to_owned(), &b.to_owned());
        self.inner().cut.insert((a, b, kind));
    }

    /// What was cut so is whole again.
    pub fn heal(&self, a: &str, b: &str, kind: Option<Kind>) {
        let mut inner = self.inner();
        let (a, b) = pair(&a.to_owned(), &b.to_owned());
        inner.cut.remove(&(a.clone(), b.clone(), kind));
        let links: Vec<Link> =
            inner.ends.keys().filter(|link| pair(&link.from, &link.to) == (a.clone(), b.clone())).cloned().collect();
        for link in links {
            if inner.is_cut(&link.from, &link.to, Some(link.kind)) {
                continue;
            }
            let (attempt, state) = (inner.ends[&link].attempt, inner.ends[&link].state.clone());
            match state {
                Path::Connecting => {
                    let at = inner.soon();
                    inner.schedule(at, Event::Connected { link, attempt });
                }
                Path::Up => inner.release(&link),
                Path::Down(_) | Path::None => {}
            }
        }
    }

    /// Whether this path between two nodes can be made; those that stand are not touched.
    pub fn allow(&self, a: &str, b: &str, kind: Kind, allowed: bool) {
        let (a, b) = pair(&a.to_owned(), &b.to_owned());
        let mut inner = self.inner();
        if allowed {
            inner.refused.remove(&(a, b, kind));
        } else {
            inner.refused.insert((a, b, kind));
        }
    }

    /// A path breaks as seen from `a`, without anything else being wrong: what it carried is lost.
    pub fn break_path(&self, a: &str, b: &str, kind: Kind) {
        let mut inner = self.inner();
        let link = Link { from: a.into(), to: b.into(), kind };
        if inner.ends.get(&link).is_some_and(|end| end.state == Path::Up) {
            inner.break_path(&link, "it broke");
        }
    }

    /// From now on the network is as unkind as this.
    pub fn set_faults(&self, faults: Faults) {
        let mut inner = self.inner();
        assert_eq!(inner.faults.lanes, faults.lanes, "paths keep their lanes");
        inner.faults = faults;
    }

    /// One bit of the next copy that is submitted flips on the way.
    pub fn corrupt_next(&self) {
        self.inner().sabotage.push_back(Sabotage::Corrupt);
    }

    /// The next copy that is submitted loses one strip and says `Done` all the same.
    pub fn drop_strip_of_next(&self) {
        self.inner().sabotage.push_back(Sabotage::DropStrip);
    }

    /// The next copy that is submitted loses its lane.
    pub fn lose_next(&self) {
        self.inner().sabotage.push_back(Sabotage::Lose);
    }

    /// The next copy that is submitted finds that its lane has stalled.
    pub fn stall_next(&self) {
        self.inner().sabotage.push_back(Sabotage::Stall);
    }

    /// Virtual time.
    pub fn now(&self) -> Nanos {
        self.inner().now
    }

    /// When the next thing happens, if anything does.
    pub fn next(&self) -> Option<Nanos> {
        self.inner().events.first_key_value().map(|((at, _), _)| *at)
    }

    /// Lets copies go on for one event (for tests without a [`World`]). False if nothing is under way.
    pub fn step(&self) -> bool {
        !matches!(self.inner().step(), Step::Nothing)
    }

    /// Lets time pass in which nothing happens.
    ///
    /// # Panics
    /// If something happens before `until`.
    pub fn wait(&self, until: Nanos) {
        let mut inner = self.inner();
        assert!(inner.events.first_key_value().is_none_or(|((at, _), _)| *at >= until), "something happens before");
        inner.now = inner.now.max(until);
    }
}

/// One node's end of a [`Network`].
pub struct SimTransport {
    node: NodeId,
    life: Incarnation,
    kind: Kind,
    network: Network,
}

impl SimTransport {
    fn link(&self, peer: &NodeId) -> Link {
        Link { from: self.node.clone(), to: peer.clone(), kind: self.kind }
    }

    /// The network, if this life is not over: what a dead process does no more.
    fn living(&self) -> Option<MutexGuard<'_, Inner>> {
        let inner = self.network.inner();
        inner.lives.get(&self.node).is_some_and(|life| life.incarnation == self.life).then_some(inner)
    }
}

impl Transport for SimTransport {
    fn register(&mut self, regions: Arc<Regions>) {
        if let Some(mut inner) = self.living() {
            inner.lives.entry(self.node.clone()).and_modify(|life| life.regions = Some(regions));
        }
    }

    fn connect(&mut self, peer: &NodeAddress) {
        if let Some(mut inner) = self.living() {
            inner.connect(self.link(&peer.node), peer);
        }
    }

    fn path(&self, peer: &NodeId) -> Path {
        let end = self.living().and_then(|inner| inner.ends.get(&self.link(peer)).map(|end| end.state.clone()));
        end.unwrap_or(Path::None)
    }

    fn submit(&mut self, peer: &NodeId, copies: &[Copy]) -> Result<(), Busy> {
        self.living().map_or(Ok(()), |mut inner| inner.submit(&self.link(peer), copies))
    }

    fn poll(&mut self, into: &mut Vec<Completion>) {
        if let Some(mut inner) = self.living()
            && let Some(completions) =
                inner.lives.get_mut(&self.node).and_then(|life| life.completions.get_mut(&self.kind))
        {
            into.append(completions);
        }
    }

    fn close(&mut self, peer: &NodeId) {
        if let Some(mut inner) = self.living() {
            inner.close(&self.link(peer));
        }
    }
}
