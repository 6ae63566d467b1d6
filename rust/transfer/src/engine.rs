//! The engine: grants, pushes and fetches, written once, above `Transport`. Sans-IO.
//!
//! The shell (`daemon`) feeds [`Input`]s and carries out [`Output`]s; so does the model test, in virtual time.
//!
//! ```text
//! prefill's daemon                                 decode's daemon
//!                                                  <- Grant (decode worker): slots reserved            grants.rs
//! <- Open (prefill worker)   ---- Open ---->       waits for the grant
//!                            <--- Opened ---       slots
//! <- Push                    ==== copies ===>      each verified, strip by strip, by the transport     copies.rs
//!    all done                ---- Commit --->      all strips here? readable: Arrived                  push.rs
//! -> Pushed                  <-- Committed --      last one and the note: Complete
//! <- End                     ----- End ----->
//! ```
//!
//! A fetch (`fetch.rs`, `serve.rs`) is the same the other way round: the holder pushes into slots that the asker has
//! reserved. `stores.rs` shares memory between layouts, `behind.rs` has the medium behind it.
//! If both workers sit on one daemon, `Opened` carries the slots, and `Push` commits in place.

mod admin;
mod anew;
mod behind;
mod clear;
mod cluster;
mod copies;
mod copying;
mod doubts;
mod drain;
mod fetch;
mod forget;
mod grants;
pub mod keep;
mod objects;
mod pace;
mod push;
mod quests;
mod replicate;
mod scrub;
mod serve;
mod stores;

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use crate::admin::{Cursor, Verified};
use crate::error::Error;
use crate::memory::Arena;
use crate::messages::{DaemonOrder, DaemonReport, LocalEvent, LocalRequest, PeerMessage, Refusal, Ticket};
use crate::objects::classes::Class;
use crate::pool::account::{Accounts, Quota};
use crate::pool::policy::{self, Policy};
use crate::pool::tier::Tier;
use crate::pool::{Change, Holder, Remembered, Wish};
use crate::stats::{Snapshot, Stats};
use crate::transport::{Copy, CopyId};
use crate::types::{BlockKey, ClientId, Kind, Layout, Medium, Nanos, NodeAddress, NodeId, Owner, RegionId, Tag};

pub use admin::Stretch;
pub use copies::Copied;
pub use keep::{Keeping, Kept, Pins};
pub use objects::NAMESPACE as OBJECTS;

use behind::Behind;
use clear::Clearings;
use cluster::Cluster;
use copies::Job;
use drain::Drain;
use fetch::{Aim, Fetch, Flight};
use grants::{Opener, Visit};
use keep::Keeps;
use objects::Objects;
use pace::Pace;
use push::{Open, Opened};
use replicate::{Hint, Replication};
use scrub::Scrubs;
use serve::Serving;
use stores::Stores;

/// What can happen to an engine.
#[allow(missing_docs)] // Fields are explained by their variant.
#[derive(Clone, Debug)]
pub enum Input {
    /// A local client sent a request (its first is `Attach`).
    Local { client: ClientId, request: LocalRequest },
    /// A local client's connection is gone: the process is proven dead or has let go; its tags end, its writes are over.
    LocalGone { client: ClientId },
    /// A session with this peer stands (dialled by either side).
    PeerUp { peer: NodeAddress },
    /// The session ended or could not be made.
    PeerDown { peer: NodeAddress },
    /// A peer said something.
    Peer { peer: NodeId, message: PeerMessage },
    /// Copies have completed.
    Completed(Vec<Copied>),
    /// The conductor ordered something.
    Order(DaemonOrder),
    /// Who shares objects with this node: those with whom the shell keeps sessions, and the addresses of those that it has
    /// not reached yet.
    Members { known: Vec<NodeAddress>, strangers: Vec<String> },
    /// What was reported has gone out, or most of it: there is room for more of a dump; see [`Engine::is_dumping`].
    DumpOn,
    /// The medium behind the arena has something to do or to tell.
    Tier,
    /// The end is near: what is in the arena only is written to that medium. `Tier` goes on until [`Engine::has_left`] or
    /// the shell loses its patience; then it calls [`Engine::close`].
    Stop,
    /// Time has passed. The shell calls at least every 100 ms.
    Tick,
}

/// What the engine wants done, in this order.
#[allow(missing_docs)] // Fields are explained by their variant.
#[derive(Clone, Debug)]
pub enum Output {
    /// Tell a local client.
    Local { client: ClientId, event: LocalEvent },
    /// Dial this peer; `PeerUp` or `PeerDown` must follow.
    Dial { peer: NodeAddress },
    /// Tell a peer (a session stands).
    Peer { peer: NodeId, message: PeerMessage },
    /// Start copies to this peer, whose session stands; each completes once.
    Submit { peer: NodeAddress, copies: Vec<Copy> },
    /// Tell the conductor, if one is connected (the shell bounds the queue and marks a gap by dropping).
    Report(DaemonReport),
    /// The answer to [`Engine::flush_tier`].
    Flushed { number: u64, ok: bool },
    /// The answer to [`Engine::scrub`].
    Scrubbed { number: u64, found: Verified },
}

/// Nanoseconds of a second.
const SECOND: Nanos = 1_000_000_000;

/// Blocks in one part of a dump: 1024 x 36 bytes stay far below a frame's limit.
const DUMP_PART: usize = 1024;
/// Parts that are told at once; then the shell says when there is room for more.
const DUMP_PARTS: usize = 16;
/// Places that are looked at for one part: many may be empty, and serving is to go on.
const DUMP_LOOKS: u32 = 16 * DUMP_PART as u32;

/// A dump, as far as it is still to be told. Ten million blocks are not copied for it: it walks over them while they come
/// and go. What does so after the cut is told by events of later numbers, which count.
struct Dump {
    sequence: u64,
    /// Number of the next part.
    part: u32,
    /// Where the walk goes on.
    next: Option<Cursor>,
    /// Looked at, and not told yet.
    found: VecDeque<(BlockKey, BlockKey, u32, Medium)>,
}

/// The limits of an engine: everything that can grow has one.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Bytes of all arenas.
    pub dram_bytes: u64,
    /// Which block makes room for others.
    pub eviction: &'static Policy,
    /// What owners may have. None: they are not told apart.
    pub quotas: Vec<Quota>,
    /// Transports that may carry copies to peers: what counters show from the start.
    pub transports: Vec<Kind>,
    /// Grants that may wait for room; beyond: `Full`.
    pub waiting_grants: usize,
    /// Opens that may wait for a grant, or be open, here and towards peers each; beyond: `Full`.
    pub opens: usize,
    /// Fetches under way, asked and served each; beyond: `Full`.
    pub fetches: usize,
    /// Tags that one client may use before it ends some; beyond: `Full`.
    pub tags_per_client: usize,
    /// Ended tags that are remembered.
    pub ended_tags: usize,
    /// Copies under way to one peer; the others wait in the engine.
    pub copies_in_flight: usize,
    /// Copies that may wait for one peer on behalf of its fetches; beyond: `Full`.
    pub copies_waiting: usize,
    /// How often a copy is sent again after it was corrupted on the wire or its lane broke.
    pub retries: u32,
}

impl Settings {
    /// Limits for arenas of this size.
    pub fn new(dram_bytes: u64) -> Self {
        Self {
            dram_bytes,
            eviction: policy::DEFAULT,
            quotas: Vec::new(),
            transports: vec![Kind::Tcp],
            waiting_grants: 4096,
            opens: 4096,
            fetches: 4096,
            tags_per_client: 16384,
            ended_tags: 65536,
            copies_in_flight: 32,
            copies_waiting: 65536,
            retries: 1,
        }
    }
}

/// What is known of an attached client.
#[derive(Debug)]
struct Client {
    /// Number of its layout's store.
    store: usize,
    /// Of all blocks that it makes.
    namespace: u64,
    /// Tags whose `End` it owes.
    tags: BTreeSet<Tag>,
}

/// The way to one life of a peer.
struct Link {
    peer: NodeAddress,
    /// Tells this link from an earlier one to the same node.
    serial: u64,
    up: bool,
    /// Said when it is up; bounded by the limits on opens and fetches, which alone dial.
    outbox: Vec<PeerMessage>,
    waiting: std::collections::VecDeque<Job>,
    in_flight: usize,
    /// How the peer answers fetches.
    pace: Pace,
}

/// A node's daemon, without its sockets. Single-threaded; all collections that are walked are ordered, so that the
/// same inputs give the same outputs.
pub struct Engine {
    node: NodeAddress,
    settings: Settings,
    now: Nanos,
    out: Vec<Output>,
    stores: Stores,
    objects: Objects,
    cluster: Cluster,
    clients: BTreeMap<ClientId, Client>,
    links: BTreeMap<NodeId, Link>,
    /// Who writes, or waits for, grants of this pool.
    visits: BTreeMap<Tag, Visit>,
    /// Grants elsewhere (or here, by another client) that local clients write to.
    opens: BTreeMap<Tag, Open>,
    ended_opens: Remembered<Tag>,
    /// Blocks on their way here.
    flights: BTreeMap<Aim, Flight>,
    /// Which flight has what a holder wants.
    wants: BTreeMap<(Holder, u32), Aim>,
    /// What is to be asked of peers, after this input.
    asks: Vec<(NodeAddress, Aim)>,
    fetches: BTreeMap<Ticket, Fetch>,
    /// Blocks that will be prefetched.
    hints: VecDeque<Hint>,
    behind: Option<Behind>,
    scrubs: Scrubs,
    keeps: Keeps,
    clearings: Clearings,
    serving: BTreeMap<(NodeId, Ticket), Serving>,
    /// By order; each holds slots, or waits for a fetch.
    replications: BTreeMap<u64, Replication>,
    copies: BTreeMap<CopyId, Job>,
    /// Source of tickets, copy ids and serials.
    next_number: u64,
    /// Of the next stored or removed event.
    next_sequence: u64,
    next_heartbeat: Nanos,
    /// When time passed last.
    ticked: Nanos,
    dumping: Option<Dump>,
    stats: Stats,
    /// Takes on nothing new.
    draining: Option<Drain>,
}

impl Engine {
    /// An engine with no arena yet: clients' layouts make them.
    pub fn new(node: NodeAddress, settings: Settings) -> Self {
        let ended_opens = Remembered::new(settings.ended_tags);
        let mut stores =
            Stores::new(settings.dram_bytes, settings.waiting_grants, settings.ended_tags, settings.eviction);
        stores.tell_apart(Accounts::new(&settings.quotas));
        let objects = Objects::new(settings.dram_bytes);
        let cluster = Cluster::new(node.node.clone(), settings.dram_bytes);
        Self {
            node,
            settings,
            now: 0,
            out: Vec::new(),
            stores,
            objects,
            cluster,
            clients: BTreeMap::new(),
            links: BTreeMap::new(),
            visits: BTreeMap::new(),
            opens: BTreeMap::new(),
            ended_opens,
            flights: BTreeMap::new(),
            wants: BTreeMap::new(),
            asks: Vec::new(),
            fetches: BTreeMap::new(),
            hints: VecDeque::new(),
            behind: None,
            scrubs: Scrubs::default(),
            keeps: Keeps::default(),
            clearings: Clearings::default(),
            serving: BTreeMap::new(),
            replications: BTreeMap::new(),
            copies: BTreeMap::new(),
            next_number: 1,
            next_sequence: 0,
            next_heartbeat: 0,
            ticked: 0,
            dumping: None,
            stats: Stats::default(),
            draining: None,
        }
    }

    /// An engine with a medium behind its arenas. What is there already counts as reported: whoever keeps an index asks for
    /// a dump when he sees the number of the next event.
    pub fn with_tier(node: NodeAddress, settings: Settings, tier: Box<dyn Tier>) -> Self {
        let behind = Behind::new(tier);
        let next_sequence = behind.count();
        let mut engine = Self { behind: Some(behind), next_sequence, ..Self::new(node, settings) };
        engine.recover_objects();
        engine
    }

    /// Reacts to one input at `now` (monotonic). Outputs are appended in the order in which they are to be carried out.
    ///
    /// After `Output::Submit` every copy completes once, whatever happens to the session: on `PeerDown` the shell
    /// closes the transport's path and still delivers the completions.
    pub fn handle(&mut self, input: Input, now: Nanos, out: &mut Vec<Output>) {
        self.now = now;
        self.stores.turn(now);
        self.notice_reads();
        self.keep_objects();
        match input {
            Input::Local { client, request } => self.local(client, request),
            Input::LocalGone { client } => {
                let tags = self.clients.get_mut(&client).map(|client| std::mem::take(&mut client.tags));
                for tag in tags.unwrap_or_default() {
                    self.end(client, tag);
                }
                self.clients.remove(&client);
                self.object_client_gone(client);
                self.forget_flushes(client);
            }
            Input::PeerUp { peer } => self.peer_up(peer),
            Input::PeerDown { peer } => self.peer_down(&peer),
            Input::Peer { peer, message } => {
                if self.links.get(&peer).is_some_and(|link| link.up) {
                    self.peer(&peer, message);
                }
            }
            Input::Completed(copied) => self.completed(copied),
            Input::Order(DaemonOrder::Dump) => self.dump(),
            Input::DumpOn => self.dump_on(),
            Input::Order(DaemonOrder::Replicate { order, keys, parent, position, from }) => {
                self.replicate(order, keys, parent, position, from);
            }
            Input::Order(DaemonOrder::Moved { blocks, left }) => self.moved_elsewhere(blocks, left),
            Input::Order(DaemonOrder::Members { members }) => self.order_members(members),
            Input::Members { known, strangers } => self.list_members(known, strangers),
            Input::Order(DaemonOrder::Clear { order, whose }) => self.clear(order, whose),
            Input::Order(DaemonOrder::Forget { keys }) => self.forget(&keys),
            Input::Tier => self.tier(),
            Input::Stop => self.begin_leaving(),
            Input::Tick => self.tick(),
        }
        self.settle();
        out.append(&mut self.out);
    }

    /// Which node, in which life.
    pub fn node(&self) -> &NodeAddress {
        &self.node
    }

    /// The arena of an attached client's layout.
    pub fn arena(&self, client: ClientId) -> Option<Arc<Arena>> {
        self.stores.get(self.clients.get(&client)?.store).map(|store| store.arena.clone())
    }

    /// All arenas, each under its number.
    pub fn arenas(&self) -> impl Iterator<Item = (RegionId, &Arc<Arena>)> {
        self.stores.iter().map(|store| (store.region, &store.arena))
    }

    /// Bytes of arenas that were given back to the system since the last call.
    pub fn take_released(&mut self) -> Vec<(RegionId, Range<u64>)> {
        self.stores.take_released()
    }

    /// Number that the next stored or removed event will have (for the `Hello` of a report session).
    pub fn next_sequence(&self) -> u64 {
        self.next_sequence
    }

    /// Counters as Prometheus samples.
    pub fn counters(&self) -> Vec<(String, u64)> {
        let occupancy = self.stores.occupancy();
        let mut snapshot = Snapshot { stats: self.stats, occupancy, tier: self.tier_capacity(), ..Snapshot::default() };
        (snapshot.kept, snapshot.keep_limit) = (self.kept(), self.keep_limit());
        snapshot.blocked = self.stores.iter().map(|store| store.pool.blocked()).sum();
        for store in self.stores.iter() {
            let (tally, grants) = (store.pool.tally(), store.pool.grants());
            snapshot.tally.hits += tally.hits;
            snapshot.tally.misses += tally.misses;
            snapshot.tally.evictions += tally.evictions;
            snapshot.tally.dropped += tally.dropped;
            snapshot.grants.0 += grants.0;
            snapshot.grants.1 += grants.1;
            snapshot.fenced += store.arena.fenced();
        }
        snapshot.samples(&self.node.node, &self.settings.transports)
    }

    // -- local clients -----------------------------------------------------------------------------------------------

    fn local(&mut self, client: ClientId, request: LocalRequest) {
        let tag = match request {
            LocalRequest::Attach { ticket, layout, namespace } => {
                return self.attach(client, ticket, layout, namespace);
            }
            LocalRequest::Objects(request) => return self.object_request(client, request),
            LocalRequest::Counters { ticket } => {
                let values = self.counters();
                return self.tell(client, LocalEvent::Counters { ticket, values });
            }
            LocalRequest::Flush { ticket } => return self.flush(client, ticket),
            LocalRequest::Keep { ticket, keys, ttl_ms, by } => {
                return self.keep_for(client, ticket, &keys, ttl_ms, &by);
            }
            LocalRequest::Unkeep { ticket, keys, by } => return self.unkeep_for(client, ticket, &keys, &by),
            LocalRequest::End { tag } => {
                if let Some(known) = self.clients.get_mut(&client) {
                    known.tags.remove(&tag);
                    self.end(client, tag);
                }
                return;
            }
            LocalRequest::Grant { tag, .. }
            | LocalRequest::Lookup { tag, .. }
            | LocalRequest::Commit { tag, .. }
            | LocalRequest::Fetch { tag, .. }
            | LocalRequest::Open { tag, .. }
            | LocalRequest::Push { tag, .. }
            | LocalRequest::Corrupt { tag, .. } => tag,
            // A hint is never answered.
            LocalRequest::Prefetch { .. } if self.is_draining() => return,
            LocalRequest::Prefetch { keys, parent, position, from } => {
                return self.prefetch(client, &keys, parent, position, &from);
            }
        };
        if self.turns_away(&request) {
            return self.refuse(client, tag, Refusal::Full);
        }
        let Some(known) = self.clients.get_mut(&client) else { return self.refuse(client, tag, Refusal::Protocol) };
        let (store, namespace, tags) = (known.store, known.namespace, &mut known.tags);
        if tags.len() >= self.settings.tags_per_client && !tags.contains(&tag) {
            return self.refuse(client, tag, Refusal::Full);
        }
        tags.insert(tag);
        match request {
            LocalRequest::Grant { keys, private, parent, position, mode, tenant, .. } => {
                let owner = Owner { namespace, tenant };
                let wish = Wish { keys, private: private == 1, parent, position, owner };
                if private > 1 {
                    return self.refuse(client, tag, Refusal::Protocol);
                }
                self.grant(store, Holder { client: Some(client), tag }, wish, mode);
            }
            LocalRequest::Lookup { keys, .. } => self.lookup(store, client, tag, &keys),
            LocalRequest::Commit { indices, .. } => self.local_commit(client, tag, &indices),
            LocalRequest::Fetch { indices, from, .. } => self.fetch(client, tag, &indices, &from),
            LocalRequest::Open { to, within_ms, .. } => self.open(client, tag, to, within_ms),
            LocalRequest::Push { local, indices, first, strips, note, .. } => {
                self.push(client, (local, first), tag, &indices, strips, note);
            }
            LocalRequest::Corrupt { index, .. } => self.corrupt(client, tag, index),
            LocalRequest::Attach { .. }
            | LocalRequest::End { .. }
            | LocalRequest::Counters { .. }
            | LocalRequest::Objects(_)
            | LocalRequest::Flush { .. }
            | LocalRequest::Keep { .. }
            | LocalRequest::Unkeep { .. }
            | LocalRequest::Prefetch { .. } => {}
        }
    }

    fn attach(&mut self, client: ClientId, ticket: Ticket, layout: Layout, namespace: u64) {
        let attached = self.clients.get(&client).and_then(|client| self.stores.get(client.store));
        if attached.is_some_and(|store| store.layout() != layout) {
            let reason = "this client has attached with another layout: use a connection for each".to_owned();
            return self.tell(client, LocalEvent::AttachRefused { ticket, reason });
        }
        if Class::of(layout).is_some() {
            let reason = "blocks of this layout are objects: cut yours into more strips".to_owned();
            return self.tell(client, LocalEvent::AttachRefused { ticket, reason });
        }
        let store = match self.store_for(layout) {
            Ok(store) => store,
            Err(error) => {
                return self.tell(client, LocalEvent::AttachRefused { ticket, reason: error.message });
            }
        };
        let Some(arena) = self.stores.get(store).map(|store| store.arena.clone()) else { return };
        let (slots, arena_bytes, node) = (arena.slots(), arena.bytes(), self.node.clone());
        self.clients.entry(client).or_insert_with(|| Client { store, namespace, tags: BTreeSet::new() });
        self.tell(client, LocalEvent::Attached { ticket, slots, layout, arena_bytes, node });
    }

    /// The store of a layout; makes it if it is new.
    fn store_for(&mut self, layout: Layout) -> Result<usize, Error> {
        if let Some(store) = self.stores.of(layout) {
            return Ok(store);
        }
        let (at, never) = self.stores.attach(layout, self.now)?;
        for Holder { client, tag } in never {
            if let Some(client) = client {
                self.refuse(client, tag, Refusal::TooLarge);
            }
        }
        if let Some(store) = self.stores.get_mut(at) {
            if store.objects {
                self.objects.catalog.add_arena(store.region, store.arena.clone());
            }
            if self.behind.is_some() {
                store.pool.watch_hits();
            }
        }
        Ok(at)
    }

    /// Number of the store of a client's layout.
    fn home(&self, client: ClientId) -> Option<usize> {
        self.clients.get(&client).map(|client| client.store)
    }

    fn tell(&mut self, client: ClientId, event: LocalEvent) {
        self.out.push(Output::Local { client, event });
    }

    fn refuse(&mut self, client: ClientId, tag: Tag, refusal: Refusal) {
        self.tell(client, LocalEvent::Refused { tag, refusal });
    }

    // -- peers -------------------------------------------------------------------------------------------------------

    /// Says something to this life of a peer, dialling first if need be. False: it cannot be that life.
    fn reach(&mut self, peer: &NodeAddress, message: PeerMessage) -> bool {
        if let Some(link) = self.links.get_mut(&peer.node) {
            if link.peer.incarnation != peer.incarnation {
                return false;
            }
            if link.up {
                self.out.push(Output::Peer { peer: peer.node.clone(), message });
            } else {
                link.outbox.push(message);
            }
            return true;
        }
        let mut link = self.new_link(peer.clone());
        link.outbox.push(message);
        self.links.insert(peer.node.clone(), link);
        self.out.push(Output::Dial { peer: peer.clone() });
        true
    }

    /// Says something to a peer if it is there to hear.
    fn say(&mut self, peer: &NodeId, message: PeerMessage) {
        if let Some(link) = self.links.get_mut(peer) {
            if link.up {
                self.out.push(Output::Peer { peer: peer.clone(), message });
            } else {
                link.outbox.push(message);
            }
        }
    }

    fn new_link(&mut self, peer: NodeAddress) -> Link {
        let serial = self.number();
        let pace = Pace::default();
        Link { peer, serial, up: false, outbox: Vec::new(), waiting: Default::default(), in_flight: 0, pace }
    }

    fn peer_up(&mut self, peer: NodeAddress) {
        if let Some(link) = self.links.get(&peer.node)
            && link.peer.incarnation != peer.incarnation
        {
            let old = link.peer.clone();
            self.peer_down(&old);
        }
        let mut link = match self.links.remove(&peer.node) {
            Some(link) => link,
            None => self.new_link(peer.clone()),
        };
        link.up = true;
        for message in link.outbox.drain(..) {
            self.out.push(Output::Peer { peer: peer.node.clone(), message });
        }
        self.links.insert(peer.node.clone(), link);
        self.fetches_begin(&peer.node);
        self.member_up(&peer.node);
    }

    fn peer_down(&mut self, peer: &NodeAddress) {
        if self.links.get(&peer.node).is_none_or(|link| link.peer.incarnation != peer.incarnation) {
            return;
        }
        if let Some(link) = self.links.remove(&peer.node) {
            link.waiting.into_iter().for_each(|job| self.drop_job(job));
        }
        self.opens_lost(&peer.node);
        self.visitors_lost(&peer.node);
        self.servings_lost(&peer.node);
        self.fetches_lost(&peer.node);
        self.member_down(&peer.node);
    }

    fn peer(&mut self, peer: &NodeId, message: PeerMessage) {
        match message {
            PeerMessage::Open { tag, layout, namespace, within_ms } => {
                let deadline = self.deadline(within_ms);
                self.visit(tag, Opener::Peer(peer.clone()), (layout, namespace), deadline);
            }
            PeerMessage::Opened { tag, region, slots } => self.peer_opened(peer, tag, region, slots),
            PeerMessage::OpenRefused { tag, refusal } => {
                if self.opens.get(&tag).is_some_and(|open| open.to.node == *peer && !open.over()) {
                    self.fail_open(tag, refusal, false);
                }
            }
            PeerMessage::Commit { tag, indices, via, note } => self.peer_commit(peer, tag, &indices, via, note),
            PeerMessage::Committed { tag, indices, note, refusal } => {
                self.peer_committed(peer, tag, indices, note, refusal);
            }
            PeerMessage::End { tag } => {
                self.visitor_gone(tag, &Opener::Peer(peer.clone()), Refusal::Ended);
                if self.opens.get(&tag).is_some_and(|open| open.to.node == *peer && !open.over()) {
                    self.fail_open(tag, Refusal::Ended, false);
                }
            }
            PeerMessage::Objects(talk) => self.talk(peer, talk),
            PeerMessage::Fetch { ticket, region, layout, blocks } => self.serve(peer, ticket, region, layout, blocks),
            PeerMessage::Fetched { ticket, place, copied } => self.peer_fetched(peer, ticket, place, copied),
            PeerMessage::FetchCancel { ticket } => self.peer_cancel(peer, ticket),
            PeerMessage::FetchEnded { ticket } => self.fetch_ended(peer, ticket),
        }
    }

    // -- time, reports, invariants -----------------------------------------------------------------------------------

    fn deadline(&self, within_ms: u64) -> Nanos {
        self.now.saturating_add(within_ms.saturating_mul(1_000_000))
    }

    fn number(&mut self) -> u64 {
        self.next_number += 1;
        self.next_number - 1
    }

    fn tick(&mut self) {
        let late = |open: &Open| matches!(open.state, Opened::Waiting) && open.deadline <= self.now;
        let tags: Vec<Tag> = self.opens.iter().filter(|(_, open)| late(open)).map(|(tag, _)| *tag).collect();
        for tag in tags {
            self.fail_open(tag, Refusal::Deadline, true);
        }
        self.visits_late();
        self.fetches_late();
        self.redial_members();
        self.pass_removals();
        self.hear_anew();
        self.quests_late();
        self.copying_tick();
        self.objects_tick();
        self.ticked = self.now;
        self.keeps_end();
        self.clear_on();
        self.tier();
        if self.now >= self.next_heartbeat {
            self.next_heartbeat = self.now + SECOND;
            self.report_changes();
            let ((here, mut xor), (behind, other)) = (self.stores.digest(), self.tier_digest());
            xor.iter_mut().zip(other).for_each(|(sum, byte)| *sum ^= byte);
            let (count, xor) = (here + behind, BlockKey(xor));
            let (next_sequence, counters, draining) = (self.next_sequence(), self.counters(), self.is_draining());
            let heartbeat = DaemonReport::Heartbeat { next_sequence, count, xor, counters, draining };
            self.out.push(Output::Report(heartbeat));
        }
    }

    /// Looks at the medium behind the arena, and gives it more to do.
    fn tier(&mut self) {
        self.look_at_tier();
        self.leave_on();
        self.flush_on();
        self.write_held();
        self.clean_ahead();
        self.give_up_room();
    }

    fn dump(&mut self) {
        // What it has done and not told yet would be in the dump, and be told once more.
        self.look_at_tier();
        self.report_changes();
        let sequence = self.next_sequence();
        let next = Some(Cursor { store: 0, slot: 0 });
        self.dumping = Some(Dump { sequence, part: 0, next, found: VecDeque::new() });
        self.dump_on();
    }

    /// Tells more of a dump: at once all of it would not fit into what may wait for the conductor.
    fn dump_on(&mut self) {
        let Some(Dump { sequence, mut part, mut next, mut found }) = self.dumping.take() else { return };
        for _ in 0..DUMP_PARTS {
            let mut looks = DUMP_LOOKS;
            while let Some(at) = next.filter(|_| found.len() < DUMP_PART && looks > 0) {
                looks -= DUMP_PART as u32;
                let (blocks, behind) = self.dump_stretch(at, DUMP_PART as u32);
                found.extend(
                    blocks.into_iter().map(|(place, medium)| (place.key, place.parent, place.position, medium)),
                );
                next = behind;
            }
            let blocks = found.drain(..found.len().min(DUMP_PART)).collect();
            let last = next.is_none() && found.is_empty();
            self.out.push(Output::Report(DaemonReport::Dump { sequence, part, blocks, last }));
            part += 1;
            if last {
                return;
            }
        }
        self.dumping = Some(Dump { sequence, part, next, found });
    }

    /// True while a dump waits for [`Input::DumpOn`].
    pub fn is_dumping(&self) -> bool {
        self.dumping.is_some()
    }

    /// Nobody is there who would hear the rest of a dump.
    pub fn stop_dumping(&mut self) {
        self.dumping = None;
    }

    /// After every input: grant what fits now, report what was stored and removed, keep the lanes full.
    fn settle(&mut self) {
        for (holder, slots) in self.stores.advance() {
            self.granted(holder, slots);
        }
        self.prefetch_on();
        self.copying_on();
        self.send_asks();
        self.write_hits();
        self.report_changes();
        self.tell_homes();
        self.pump();
    }

    /// Tells the conductor what has become readable in the arena, and what is not any more.
    fn report_changes(&mut self) {
        self.note_objects();
        let changes: Vec<Change> = self.stores.iter_mut().flat_map(|store| store.pool.take_changes()).collect();
        for change in changes {
            let sequence = self.next_sequence;
            self.next_sequence += 1;
            self.out.push(Output::Report(match change {
                Change::Stored(place) => DaemonReport::Stored {
                    sequence,
                    key: place.key,
                    parent: place.parent,
                    position: place.position,
                    medium: Medium::Dram,
                },
                Change::Removed(key) => DaemonReport::Removed { sequence, key, medium: Medium::Dram },
            }));
            if let Change::Removed(key) = change {
                self.kept_is_gone(&key);
            }
        }
    }

    /// True if nothing is held, awaited or under way: all that is left is the cache.
    pub fn idle(&self) -> bool {
        self.unfinished().is_empty()
    }

    /// What is held, awaited or under way, for a person.
    pub fn unfinished(&self) -> Vec<String> {
        let waiting = self.links.values().flat_map(|link| &link.waiting);
        let mut all: Vec<String> = Vec::new();
        all.extend(
            self.clients.iter().filter(|(_, known)| !known.tags.is_empty()).map(|client| format!("owed {client:?}")),
        );
        all.extend(self.objects.unfinished());
        all.extend(self.cluster.unfinished());
        all.extend(self.visits.iter().map(|visit| format!("visit {visit:?}")));
        all.extend(self.opens.iter().map(|open| format!("open {open:?}")));
        all.extend(self.flights.iter().map(|flight| format!("flight {flight:?}")));
        all.extend(self.hints.iter().map(|hint| format!("prefetch {hint:?}")));
        all.extend((!self.nobody_flushes()).then(|| "flush".to_owned()));
        all.extend(self.replications.iter().map(|replication| format!("replication {replication:?}")));
        all.extend(self.fetches.iter().map(|fetch| format!("fetch {fetch:?}")));
        all.extend(self.serving.iter().map(|serving| format!("serving {serving:?}")));
        all.extend(self.copies.values().chain(waiting).map(|copy| format!("copy {copy:?}")));
        for store in self.stores.iter().filter(|store| !store.pool.idle()) {
            all.push(format!("pool {:?} with grants {:?}", store.pool.occupancy(), store.pool.grants()));
        }
        all
    }

    /// Asserts every invariant.
    ///
    /// # Panics
    /// If one does not hold.
    pub fn check(&self) {
        let Settings { opens, fetches, tags_per_client, copies_in_flight, .. } = self.settings;
        assert!(self.opens.len() <= opens && self.visits.len() <= opens, "too many opens");
        assert!(self.fetches.len() <= fetches && self.serving.len() <= fetches, "too many fetches");
        let queued = || self.links.values().flat_map(|link| &link.waiting);
        let mut reads: HashMap<(usize, u32), u32> = HashMap::new();
        for job in queued().chain(self.copies.values()) {
            *reads.entry((job.store, job.source.slot)).or_default() += 1;
        }
        for link in self.links.values() {
            let in_flight = self.copies.values().filter(|job| job.link == link.serial).count();
            assert_eq!(link.in_flight, in_flight, "copies under way to {:?}", link.peer);
            assert!(link.in_flight <= copies_in_flight, "too many copies under way to {:?}", link.peer);
            assert!(link.up || link.waiting.is_empty(), "copies wait for {:?}, which is not up", link.peer);
        }
        for known in self.clients.values() {
            assert!(known.tags.len() <= tags_per_client, "too many tags");
        }
        for (tag, open) in &self.opens {
            assert!(
                self.clients.get(&open.client).is_some_and(|known| known.tags.contains(tag)),
                "an open of nobody: {tag:?}"
            );
            open.check(*tag, queued().chain(self.copies.values()));
        }
        let jobs: Vec<&Job> = queued().chain(self.copies.values()).collect();
        self.check_servings(jobs.iter().copied());
        self.check_fetches();
        self.check_tier();
        self.check_keeps();
        self.stores.check();
        self.check_objects();
        self.check_cluster();
        self.check_copying();
        for (at, store) in self.stores.iter().enumerate() {
            for slot in 0..store.pool.slots() {
                let expected = reads.remove(&(at, slot)).unwrap_or(0);
                assert_eq!(store.pool.copies(slot), expected, "copies that read slot {slot} of store {at}");
            }
        }
        assert!(reads.is_empty(), "copies read what no store has: {reads:?}");
    }
}
