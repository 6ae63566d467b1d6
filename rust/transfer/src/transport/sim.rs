//! A network in virtual time, for tests: deterministic from its seed, and as unkind as it is told to be.
//!
//! [`Network`] carries copies and implements [`Transport`] for every node that joins it. [`World`] is the twin of
//! `daemon`: it runs whole engines over such a network and carries their control messages, dials and deaths.
//!
//! A copy's life, each arrow a seeded delay; whatever breaks in between shows at its end:
//!
//! ```text
//! submit ---> begin: destination's WriteHold ---> end: bytes applied, strips verified ---> ack: completion
//!        \--- the lane breaks: completes as Lost at once; the bytes may still arrive, late, and must be fenced
//! ```

mod world;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::memory::checksum;
use crate::messages::PeerMessage;
pub use crate::random::Random;
use crate::region::{By, Denied, Reading, Regions, Writing, pieces};
use crate::types::{Nanos, NodeAddress, NodeId};

pub use world::World;

use super::{Busy, Completion, Copy, CopyId, Outcome, Path, Transport};

const MILLISECOND: Nanos = 1_000_000;
/// A session that carries nothing this long is dead.
const SILENCE: Nanos = 3_000 * MILLISECOND;

/// How unkind the network is.
#[derive(Clone, Copy, Debug)]
pub struct Faults {
    /// Every delay is drawn between 1 ns and this.
    pub delay: Nanos,
    /// Of a thousand copies, how many have a strip corrupted on the way.
    pub corrupt: u64,
    /// Of a thousand copies, how many lose their lane.
    pub lose: u64,
    /// Copies that one lane takes before it is `Busy`.
    pub lane: usize,
}

impl Default for Faults {
    fn default() -> Self {
        Self { delay: 5 * MILLISECOND, corrupt: 0, lose: 0, lane: 8 }
    }
}

/// A copy under way.
struct Flight {
    from: NodeId,
    to: NodeAddress,
    copy: Copy,
    payload: Payload,
    sums: Vec<u32>,
    /// Held while the bytes are applied.
    hold: Option<Writing>,
    sabotage: Option<Sabotage>,
    /// The source has been told `Lost`; nobody waits for the outcome.
    orphan: bool,
}

enum Payload {
    /// Still read from the source.
    Held(Reading),
    /// In the network's buffers.
    Sent(Vec<u8>),
}

#[derive(Clone, Copy)]
enum Sabotage {
    /// One bit of one strip flips on the way.
    Corrupt,
    /// One strip is not written, and yet the copy says `Done`.
    DropStrip,
    /// The lane breaks.
    Lose,
}

enum Event {
    Begin(u64),
    End(u64),
    Ack(NodeId, CopyId, Outcome),
    Control(Control),
}

/// What has happened.
enum Step {
    Nothing,
    /// A copy went on.
    Copied,
    /// This node has completions.
    Completed(NodeId),
    /// For the [`World`] to do.
    Control(Control),
}

/// What a [`World`] does when its time has come.
enum Control {
    Up { at: NodeId, peer: NodeAddress, session: u64 },
    Down { at: NodeId, peer: NodeAddress },
    Message { at: NodeId, from: NodeId, session: u64, message: PeerMessage },
    Dialled { by: NodeAddress, peer: NodeAddress },
    Silent { session: u64 },
    Tick,
}

#[derive(Default)]
struct Life {
    incarnation: u64,
    regions: Option<Arc<Regions>>,
    /// Connected peers.
    peers: BTreeMap<NodeId, NodeAddress>,
    completions: Vec<Completion>,
}

struct Inner {
    random: Random,
    faults: Faults,
    now: Nanos,
    next: u64,
    events: BTreeMap<(Nanos, u64), Event>,
    lives: BTreeMap<NodeId, Life>,
    flights: BTreeMap<u64, Flight>,
    cut: BTreeSet<(NodeId, NodeId)>,
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

    fn is_cut(&self, a: &NodeId, b: &NodeId) -> bool {
        self.cut.contains(&pair(a, b))
    }

    fn alive(&self, node: &NodeAddress) -> bool {
        self.lives.get(&node.node).is_some_and(|life| life.incarnation == node.incarnation)
    }

    fn submit(&mut self, from: &NodeId, peer: &NodeId, copies: &[Copy]) -> Result<(), Busy> {
        let under_way =
            self.flights.values().filter(|flight| flight.from == *from && flight.to.node == *peer && !flight.orphan);
        // An empty lane takes any number, so that every batch gets through at last.
        let under_way = under_way.count();
        if under_way > 0 && under_way + copies.len() > self.faults.lane {
            return Err(Busy);
        }
        for copy in copies {
            let life = &self.lives[from];
            let held = life.regions.as_ref();
            let held = held.and_then(|regions| regions.begin_read(copy.local, copy.bytes.into(), By::Owner).ok());
            let (Some(held), Some(to)) = (held, life.peers.get(peer).cloned()) else {
                let at = self.soon();
                self.schedule(at, Event::Ack(from.clone(), copy.id, Outcome::Lost));
                continue;
            };
            let sabotage = self.sabotage.pop_front().or_else(|| {
                let Faults { corrupt, lose, .. } = self.faults;
                let dice = self.random.below(1000);
                let lost = (dice < corrupt + lose).then_some(Sabotage::Lose);
                if dice < corrupt { Some(Sabotage::Corrupt) } else { lost }
            });
            let mut sums = Vec::new();
            held.checksums(copy.grain, &mut sums);
            let id = self.number();
            let payload = Payload::Held(held);
            let from = from.clone();
            let flight = Flight { from, to, copy: *copy, payload, sums, hold: None, sabotage, orphan: false };
            self.flights.insert(id, flight);
            let at = self.soon();
            self.schedule(at, Event::Begin(id));
        }
        Ok(())
    }

    /// The bytes reach the destination, which takes the slot for writing.
    fn begin(&mut self, id: u64) {
        let Some(flight) = self.flights.get(&id) else { return };
        if self.is_cut(&flight.from, &flight.to.node) && !flight.orphan {
            // Nothing comes through; the silence ends the session, and that ends the copy.
            let at = self.now + SILENCE / 2;
            self.schedule(at, Event::Begin(id));
            return;
        }
        let lost = matches!(flight.sabotage, Some(Sabotage::Lose)) || !self.alive(&flight.to);
        let regions = self.lives.get(&flight.to.node).and_then(|life| life.regions.clone());
        let (false, Some(regions)) = (lost, regions) else { return self.finish(id, Outcome::Lost) };
        match regions.begin_write(flight.copy.remote, flight.copy.bytes.into(), By::Peer) {
            Err(Denied::Fenced) => self.finish(id, Outcome::Fenced),
            Err(Denied::Bounds | Denied::Permission) => self.finish(id, Outcome::Denied),
            Ok(hold) => {
                if let Some(flight) = self.flights.get_mut(&id) {
                    flight.hold = Some(hold);
                }
                let at = self.soon();
                self.schedule(at, Event::End(id));
            }
        }
    }

    /// The bytes have been received: each strip is verified and marked.
    fn end(&mut self, id: u64) {
        let Some(flight) = self.flights.get_mut(&id) else { return };
        let Some(mut hold) = flight.hold.take() else { return };
        let bytes = match &flight.payload {
            Payload::Held(held) => held.bytes(),
            Payload::Sent(bytes) => bytes,
        };
        let victim = self.random.below(flight.sums.len() as u64) as usize;
        let grain = flight.copy.grain;
        let drops = matches!(flight.sabotage, Some(Sabotage::DropStrip));
        let mut outcome = Outcome::Done;
        let mut rest = hold.bytes_mut();
        for (index, (bytes, sum)) in pieces(bytes, grain).zip(&flight.sums).enumerate() {
            let (into, behind) = std::mem::take(&mut rest).split_at_mut(bytes.len());
            rest = behind;
            if index == victim && drops {
                continue;
            }
            into.copy_from_slice(bytes);
            if index == victim && matches!(flight.sabotage, Some(Sabotage::Corrupt)) {
                into[0] ^= 1;
            }
            if checksum(into) != *sum {
                outcome = Outcome::Corrupt;
            }
        }
        if outcome == Outcome::Done && !drops {
            hold.finish(grain, &flight.sums);
        }
        self.finish(id, outcome)
    }

    fn finish(&mut self, id: u64, outcome: Outcome) {
        if let Some(flight) = self.flights.remove(&id).filter(|flight| !flight.orphan) {
            let at = self.soon();
            self.schedule(at, Event::Ack(flight.from, flight.copy.id, outcome));
        }
    }

    /// Breaks the lane from a node to a peer. Bytes that are in the network may still arrive, late.
    fn close(&mut self, from: &NodeId, peer: &NodeId) {
        let mine = |flight: &Flight| flight.from == *from && flight.to.node == *peer && !flight.orphan;
        let broken: Vec<u64> = self.flights.iter().filter(|(_, flight)| mine(flight)).map(|(id, _)| *id).collect();
        for id in broken {
            let arrives = self.random.permille(500);
            let Some(flight) = self.flights.get_mut(&id) else { continue };
            if let Some(life) = self.lives.get_mut(from) {
                life.completions.push(Completion { id: flight.copy.id, outcome: Outcome::Lost });
            }
            flight.orphan = true;
            if let Payload::Held(held) = &flight.payload {
                flight.payload = Payload::Sent(held.bytes().to_vec());
            }
            // A body that is being received ends or breaks off; either way its hold ends with it.
            if !arrives {
                self.flights.remove(&id);
            }
        }
        if let Some(life) = self.lives.get_mut(from) {
            life.peers.remove(peer);
        }
    }

    /// Lets the next event happen.
    fn step(&mut self) -> Step {
        let Some(((at, _), event)) = self.events.pop_first() else { return Step::Nothing };
        self.now = at;
        match event {
            Event::Begin(id) => self.begin(id),
            Event::End(id) => self.end(id),
            Event::Ack(node, id, outcome) => {
                if let Some(life) = self.lives.get_mut(&node) {
                    life.completions.push(Completion { id, outcome });
                }
                return Step::Completed(node);
            }
            Event::Control(control) => return Step::Control(control),
        }
        Step::Copied
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
            flights: BTreeMap::new(),
            cut: BTreeSet::new(),
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
        SimTransport { node: node.node.clone(), network: self.clone() }
    }

    /// A node dies: its lanes break.
    pub fn leave(&self, node: &NodeId) {
        let mut inner = self.inner();
        let peers: Vec<NodeId> = match inner.lives.get(node) {
            Some(life) => life.peers.keys().cloned().collect(),
            None => return,
        };
        for peer in peers {
            inner.close(node, &peer);
        }
        inner.lives.remove(node);
        // Bytes on their way to it have nowhere to go.
        for flight in inner.flights.values_mut().filter(|flight| flight.to.node == *node) {
            flight.hold = None;
            flight.sabotage = Some(Sabotage::Lose);
        }
        let stranded: Vec<u64> = inner.flights.iter().filter(|(_, f)| f.to.node == *node).map(|(id, _)| *id).collect();
        for id in stranded {
            inner.finish(id, Outcome::Lost);
        }
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

    /// Lets copies go on for one event (for tests without a [`World`]). False if nothing is under way.
    pub fn step(&self) -> bool {
        !matches!(self.inner().step(), Step::Nothing)
    }
}

/// One node's end of a [`Network`].
pub struct SimTransport {
    node: NodeId,
    network: Network,
}

impl Transport for SimTransport {
    fn register(&mut self, regions: Arc<Regions>) {
        if let Some(life) = self.network.inner().lives.get_mut(&self.node) {
            life.regions = Some(regions);
        }
    }

    fn connect(&mut self, peer: &NodeAddress) {
        if let Some(life) = self.network.inner().lives.get_mut(&self.node) {
            life.peers.insert(peer.node.clone(), peer.clone());
        }
    }

    fn path(&self, peer: &NodeId) -> Path {
        let inner = self.network.inner();
        let known = inner.lives.get(&self.node).is_some_and(|life| life.peers.contains_key(peer));
        if known { Path::Up } else { Path::None }
    }

    fn submit(&mut self, peer: &NodeId, copies: &[Copy]) -> Result<(), Busy> {
        self.network.inner().submit(&self.node, peer, copies)
    }

    fn poll(&mut self, into: &mut Vec<Completion>) {
        if let Some(life) = self.network.inner().lives.get_mut(&self.node) {
            into.append(&mut life.completions);
        }
    }

    fn close(&mut self, peer: &NodeId) {
        self.network.inner().close(&self.node, peer);
    }
}
