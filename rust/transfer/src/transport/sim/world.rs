//! The twin of `daemon`: whole engines, each with the carrier and the mover that the daemon gives it, over a simulated
//! network, and all that happens between them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::{Control, Event, Faults, MILLISECOND, Network, SILENCE, Step, pair};
use crate::carrier::Carrier;
use crate::engine::{Engine, Input, Output, Settings};
use crate::messages::{DaemonOrder, DaemonReport, LocalEvent, LocalRequest};
use crate::mover::{self, Mover, Via};
use crate::pool::tier::Tier;
use crate::pool::twin::{MemoryTier, Shelf};
use crate::types::{ClientId, Kind, Nanos, NodeAddress, NodeId};

/// The engine's shell ticks this often.
const TICK: Nanos = 100 * MILLISECOND;

struct Node {
    engine: Engine,
    carrier: Carrier,
    /// When the mover is looked at next, whatever happens.
    look: Option<Nanos>,
    /// The tier has something to do or to tell.
    rung: Arc<AtomicBool>,
}

struct Session {
    id: u64,
    /// Both ends, in the order of [`pair`].
    ends: [NodeAddress; 2],
    /// A message was lost: as a session keeps order and loses nothing, it cannot go on.
    torn: bool,
}

/// Engines over a network, and all that happens between them.
pub struct World {
    /// What carries the copies.
    pub network: Network,
    nodes: BTreeMap<NodeId, Node>,
    sessions: BTreeMap<(NodeId, NodeId), Session>,
    /// When the last thing said in a direction arrives: what is said later arrives later.
    arrivals: BTreeMap<(NodeId, NodeId), Nanos>,
    events: Vec<(NodeId, ClientId, LocalEvent)>,
    reports: Vec<(NodeId, DaemonReport)>,
    /// What [`Engine::flush_tier`] was answered.
    flushed: Vec<(NodeId, u64, bool)>,
    lives: u64,
}

impl World {
    /// A world with no nodes.
    pub fn new(seed: u64, faults: Faults) -> Self {
        // Pools fence late bytes themselves, slot by slot, so they get some.
        let network = Network::new(seed, Faults { late: true, ..faults });
        network.inner().schedule(TICK, Event::Control(Control::Tick));
        Self {
            network,
            nodes: BTreeMap::new(),
            sessions: BTreeMap::new(),
            arrivals: BTreeMap::new(),
            events: Vec::new(),
            reports: Vec::new(),
            flushed: Vec::new(),
            lives: 0,
        }
    }

    /// Virtual time.
    pub fn now(&self) -> Nanos {
        self.network.inner().now
    }

    /// Starts a node; one of that name that lives dies first.
    pub fn start(&mut self, name: &str, settings: Settings) -> NodeAddress {
        self.start_over(name, settings, None)
    }

    /// As `start`, with a tier over this shelf, of such a limit, behind the arena. It does its work when time passes.
    pub fn start_over(&mut self, name: &str, settings: Settings, tier: Option<(Shelf, u64)>) -> NodeAddress {
        self.start_behind(name, settings, |bell| {
            let (shelf, limit) = tier?;
            Some(Box::new(MemoryTier::new(shelf, limit, limit / 4).notifying(bell)))
        })
    }

    /// As `start`, with the tier that is made, if one is, behind the arena. It gets what it is to call when it has something
    /// to do or to tell.
    pub fn start_behind(
        &mut self,
        name: &str,
        settings: Settings,
        make: impl FnOnce(Box<dyn Fn() + Send + Sync>) -> Option<Box<dyn Tier>>,
    ) -> NodeAddress {
        self.kill(name);
        self.lives += 1;
        let node = NodeAddress { node: name.into(), address: format!("{name}:1"), incarnation: self.lives };
        let transport = self.network.join(&node);
        let mover = mover::Settings { seed: self.lives, ..mover::Settings::default() };
        let carrier = Carrier::new(Mover::new(vec![(Kind::Sim, Box::new(transport))], mover));
        let rung = Arc::new(AtomicBool::new(false));
        let bell = rung.clone();
        let engine = match make(Box::new(move || bell.store(true, Ordering::Relaxed))) {
            Some(tier) => Engine::with_tier(node.clone(), settings, tier),
            None => Engine::new(node.clone(), settings),
        };
        self.nodes.insert(node.node.clone(), Node { engine, carrier, look: None, rung });
        node
    }

    /// A node stops as it should: what is in its arena only goes to its tier first. Then it dies.
    pub fn stop(&mut self, name: &str) {
        let name = name.to_owned();
        self.handle(&name, Input::Stop);
        while self.nodes.get(&name).is_some_and(|node| !node.engine.has_left()) {
            self.handle(&name, Input::Tier);
        }
        if let Some(node) = self.nodes.get_mut(&name) {
            // A bound on real time, which no tier without threads comes near.
            node.engine.close(Duration::from_secs(10));
        }
        self.kill(&name);
    }

    /// A node dies; its peers see their sessions end.
    pub fn kill(&mut self, name: &str) {
        let name = name.to_owned();
        if self.nodes.remove(&name).is_none() {
            return;
        }
        self.network.leave(&name);
        let broken: Vec<_> = self.sessions.keys().filter(|(a, b)| *a == name || *b == name).cloned().collect();
        for (a, b) in broken {
            self.break_session(&a, &b);
        }
    }

    /// The session between two nodes ends, for whatever reason.
    pub fn break_session(&mut self, a: &str, b: &str) {
        let key = pair(&a.to_owned(), &b.to_owned());
        let Some(session) = self.sessions.remove(&key) else { return };
        let [first, second] = session.ends;
        for (at, peer) in [(&first, &second), (&second, &first)] {
            self.arrive(&peer.node, &at.node, Control::Down { at: at.node.clone(), peer: peer.clone() });
        }
    }

    /// Nothing comes through between two nodes any more; their session dies of silence.
    pub fn cut(&mut self, a: &str, b: &str) {
        let key = pair(&a.to_owned(), &b.to_owned());
        self.network.cut(a, b, None);
        let mut inner = self.network.inner();
        if let Some(session) = self.sessions.get(&key) {
            let at = inner.now + SILENCE;
            inner.schedule(at, Event::Control(Control::Silent { session: session.id }));
        }
    }

    /// What was cut is whole again; a session that has lost something meanwhile ends.
    pub fn heal(&mut self, a: &str, b: &str) {
        let key = pair(&a.to_owned(), &b.to_owned());
        self.network.heal(a, b, None);
        if self.sessions.get(&key).is_some_and(|session| session.torn) {
            self.break_session(a, b);
        }
    }

    /// A client of a node's daemon asks for something.
    pub fn request(&mut self, node: &str, client: ClientId, request: LocalRequest) {
        self.feed(&node.to_owned(), Input::Local { client, request });
    }

    /// A client of a node's daemon dies.
    pub fn client_gone(&mut self, node: &str, client: ClientId) {
        self.feed(&node.to_owned(), Input::LocalGone { client });
    }

    /// The conductor orders something.
    pub fn order(&mut self, node: &str, order: DaemonOrder) {
        self.feed(&node.to_owned(), Input::Order(order));
    }

    /// Whoever runs a daemon does something with its engine that is no input. `None`: the node does not live.
    pub fn act<R>(&mut self, node: &str, work: impl FnOnce(&mut Engine, Nanos, &mut Vec<Output>) -> R) -> Option<R> {
        let (name, now, mut out) = (node.to_owned(), self.now(), Vec::new());
        let result = work(&mut self.nodes.get_mut(&name)?.engine, now, &mut out);
        self.carry_out(&name, out);
        self.look(&name);
        Some(result)
    }

    /// A node takes on nothing new.
    pub fn drain(&mut self, name: &str) {
        if let Some(node) = self.nodes.get_mut(name) {
            node.engine.drain(true);
        }
    }

    /// Lets virtual time pass until something has happened.
    pub fn step(&mut self) {
        let step = self.network.inner().step();
        match step {
            Step::Nothing | Step::Copied => {}
            Step::Completed(node) => self.look(&node),
            Step::Control(control) => self.control(control),
        }
    }

    /// Lets this much virtual time pass.
    pub fn run(&mut self, duration: Nanos) {
        let until = self.now() + duration;
        while self.network.inner().events.first_key_value().is_some_and(|((at, _), _)| *at <= until) {
            self.step();
        }
        self.network.inner().now = until;
    }

    /// Takes what clients were told: node, client, event.
    pub fn take_events(&mut self) -> Vec<(NodeId, ClientId, LocalEvent)> {
        std::mem::take(&mut self.events)
    }

    /// Takes what the conductor was told.
    pub fn take_reports(&mut self) -> Vec<(NodeId, DaemonReport)> {
        std::mem::take(&mut self.reports)
    }

    /// Takes what [`Engine::flush_tier`] was answered: node, number, whether all is durable.
    pub fn take_flushed(&mut self) -> Vec<(NodeId, u64, bool)> {
        std::mem::take(&mut self.flushed)
    }

    /// The engine of a node that lives.
    pub fn engine(&self, node: &str) -> Option<&Engine> {
        self.nodes.get(node).map(|node| &node.engine)
    }

    fn control(&mut self, control: Control) {
        match control {
            Control::Tick => {
                let mut inner = self.network.inner();
                let at = inner.now + TICK;
                inner.schedule(at, Event::Control(Control::Tick));
                drop(inner);
                for node in self.nodes.keys().cloned().collect::<Vec<_>>() {
                    self.feed(&node, Input::Tick);
                }
            }
            Control::Silent { session } => {
                let dead = self.sessions.iter().find(|(_, held)| held.id == session).map(|(key, _)| key.clone());
                if let Some((a, b)) = dead.filter(|(a, b)| self.network.inner().is_cut(a, b, None)) {
                    self.break_session(&a, &b);
                }
            }
            Control::Tier { at } => self.feed(&at, Input::Tier),
            Control::Look { at } => {
                let now = self.now();
                if let Some(node) = self.nodes.get_mut(&at).filter(|node| node.look.is_some_and(|look| look <= now)) {
                    node.look = None;
                }
                self.look(&at);
            }
            Control::Dialled { by, peer } => self.dialled(by, peer),
            Control::Up { at, peer, session } => {
                if self.sessions.get(&pair(&at, &peer.node)).is_some_and(|held| held.id == session) {
                    let now = self.now();
                    if let Some(Node { carrier, .. }) = self.nodes.get_mut(&at)
                        && carrier.mover.peer(&peer.node) != Some(&peer)
                    {
                        carrier.mover.connect(&peer, Via::Auto, now);
                    }
                    self.feed(&at, Input::PeerUp { peer });
                }
            }
            Control::Down { at, peer } => {
                let now = self.now();
                if let Some(Node { carrier, .. }) = self.nodes.get_mut(&at)
                    && carrier.mover.peer(&peer.node) == Some(&peer)
                {
                    carrier.mover.disconnect(&peer.node, now);
                }
                self.feed(&at, Input::PeerDown { peer });
            }
            Control::Message { at, from, session, message } => {
                let cut = self.network.inner().is_cut(&at, &from, None);
                match self.sessions.get_mut(&pair(&at, &from)).filter(|held| held.id == session) {
                    Some(held) if cut || held.torn => held.torn = true,
                    Some(_) => self.feed(&at, Input::Peer { peer: from, message }),
                    None => {}
                }
            }
        }
    }

    fn dialled(&mut self, by: NodeAddress, peer: NodeAddress) {
        let inner = self.network.inner();
        let possible = inner.alive(&by) && inner.alive(&peer) && !inner.is_cut(&by.node, &peer.node, None);
        drop(inner);
        if !possible {
            self.arrive(&peer.node, &by.node, Control::Down { at: by.node.clone(), peer: peer.clone() });
            return;
        }
        let key = pair(&by.node, &peer.node);
        let id = match self.sessions.get(&key) {
            Some(session) => session.id,
            None => {
                let id = self.network.inner().number();
                let ends = if key.0 == by.node { [by.clone(), peer.clone()] } else { [peer.clone(), by.clone()] };
                self.sessions.insert(key, Session { id, ends, torn: false });
                id
            }
        };
        for (at, peer) in [(&by, &peer), (&peer, &by)] {
            let up = Control::Up { at: at.node.clone(), peer: peer.clone(), session: id };
            self.arrive(&peer.node, &at.node, up);
        }
    }

    /// Schedules something that travels from one node to another, behind all that went before it.
    fn arrive(&mut self, from: &NodeId, to: &NodeId, control: Control) {
        let mut inner = self.network.inner();
        let last = self.arrivals.entry((from.clone(), to.clone())).or_default();
        *last = inner.soon().max(*last + 1);
        inner.schedule(*last, Event::Control(control));
    }

    /// An input of the shell, and what comes of it.
    fn feed(&mut self, name: &NodeId, input: Input) {
        self.handle(name, input);
        self.look(name);
    }

    /// As the daemon's actor does after every batch: takes what the mover has to tell, and when it wants to be asked.
    fn look(&mut self, name: &NodeId) {
        let now = self.now();
        let Some(node) = self.nodes.get_mut(name) else { return };
        let copied = node.carrier.poll(now);
        node.carrier.mover.check();
        if !copied.is_empty() {
            self.handle(name, Input::Completed(copied));
        }
        let Some(node) = self.nodes.get_mut(name) else { return };
        if node.rung.swap(false, Ordering::Relaxed) {
            let mut inner = self.network.inner();
            let at = inner.soon();
            inner.schedule(at, Event::Control(Control::Tier { at: name.clone() }));
        }
        let Some(at) = node.carrier.mover.next_tick().map(|at| at.max(now)) else { return };
        if node.look.is_none_or(|look| at < look) {
            node.look = Some(at);
            self.network.inner().schedule(at, Event::Control(Control::Look { at: name.clone() }));
        }
    }

    fn handle(&mut self, name: &NodeId, input: Input) {
        let now = self.now();
        let Some(Node { engine, .. }) = self.nodes.get_mut(name) else { return };
        let mut out = Vec::new();
        engine.handle(input, now, &mut out);
        self.carry_out(name, out);
    }

    fn carry_out(&mut self, name: &NodeId, out: Vec<Output>) {
        let now = self.now();
        let Some(Node { engine, carrier, .. }) = self.nodes.get_mut(name) else { return };
        engine.check();
        carrier.know_arenas(engine);
        let here = engine.node().clone();
        for output in out {
            match output {
                Output::Local { client, event } => self.events.push((name.clone(), client, event)),
                Output::Report(report) => self.reports.push((name.clone(), report)),
                Output::Flushed { number, ok } => self.flushed.push((name.clone(), number, ok)),
                Output::Dial { peer } => {
                    self.arrive(name, &peer.node.clone(), Control::Dialled { by: here.clone(), peer })
                }
                Output::Peer { peer, message } => {
                    if let Some(session) = self.sessions.get(&pair(name, &peer)).map(|session| session.id) {
                        let control = Control::Message { at: peer.clone(), from: name.clone(), session, message };
                        self.arrive(name, &peer, control);
                    }
                }
                Output::Submit { peer, copies } => {
                    if let Some(node) = self.nodes.get_mut(name) {
                        node.carrier.submit(&peer.node, &copies, now);
                    }
                }
            }
        }
    }
}
