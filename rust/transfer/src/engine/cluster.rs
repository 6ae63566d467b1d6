//! Objects across nodes: who the members are, and what each tells and is told as a home of names (`objects/hints.rs`).
//!
//! ```text
//! listed by the shell, or ordered by the conductor ---> session up, Join both ways ---> member: homes move
//!                                                            \--- session down ------> no member: homes move back
//! ```
//!
//! Whenever homes move, each node tells the new ones what it holds of theirs, a part at a time, and then that this was all: a
//! home that has heard so from all knows that what it does not know is nowhere.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::messages::PeerMessage;
use crate::objects::book::Book;
use crate::objects::catalog::Entry;
use crate::objects::classes::Class;
use crate::objects::hints::{Claim, Head, Heard, Member, SELF};
use crate::objects::homes::{Homes, seed};
use crate::objects::talk::{Permit, Spot, Talk};
use crate::types::{BlockKey, ClientId, Nanos, NodeAddress, NodeId};

use super::copying::Copying;
use super::objects::is_object;
use super::quests::Quest;
use super::{Engine, Output, SECOND};

/// Objects in one part of what a home is told: far below a frame's limit.
pub(super) const PART: usize = 1024;
/// Parts that a home is told before it has heard the first.
const PARTS: usize = 4;
/// Between two attempts to reach a member that the conductor has named: from, to.
const REDIAL: (Nanos, Nanos) = (SECOND / 10, 2 * SECOND);
/// After this time a home passes on a removal: whoever removes has told of it in milliseconds, or could not.
const PASS_AFTER: Nanos = SECOND;
/// Removals to be passed on, each of a batch and to one holder; what is beyond is passed on early.
const PASSED: usize = 1024;
/// More members than that are not asked: every session takes a thread, and a daemon has a limit of those.
const MEMBERS: usize = 512;

/// Another node that shares its objects, or should.
#[derive(Debug)]
struct Known {
    address: NodeAddress,
    /// Somebody says that it is one; otherwise it is one as long as its session stands.
    named: bool,
    /// `SELF`: it has not joined.
    number: Member,
    /// Serial of the link on which it was told that this node joins.
    greeted: u64,
    /// The view of which it has told all.
    told: Option<u64>,
    /// The last number with which it has told all anew.
    anew: Option<u64>,
    redial: Nanos,
    pause: Nanos,
}

/// What a home is still to be told. Looked up when it is told, as it may be gone by then.
#[derive(Debug, Default)]
pub(super) struct Telling {
    pub rest: VecDeque<BlockKey>,
    unheard: usize,
    pub ended: bool,
    /// What is said at the end before the view.
    pub anew: Option<u64>,
}

/// Removals that a holder is to be told of: when, whom, and which names and values.
type Passed = (Nanos, NodeId, Vec<(BlockKey, BlockKey)>);

/// The engine's books about other nodes' objects.
#[derive(Debug)]
pub(super) struct Cluster {
    known: BTreeMap<NodeId, Known>,
    /// Addresses of members that were never reached: nobody knows who they are.
    strangers: Vec<String>,
    listed: Vec<NodeAddress>,
    ordered: Vec<NodeAddress>,
    numbers: Member,
    book: Arc<RwLock<Book>>,
    /// Names the set of homes: two nodes with the same view have the same homes.
    view: u64,
    /// What the homes are to be told after this input.
    news: Vec<(Head, bool)>,
    pub tellings: BTreeMap<NodeId, Telling>,
    /// When a holder is told of removals, of which another node should have told it.
    removals: VecDeque<Passed>,
    /// The number with which all are to tell anew, since the last view; not before then again.
    pub anew: Option<u64>,
    pub anew_after: Nanos,
    /// Whether these are where the hints say is to be asked after this input.
    pub doubts: BTreeMap<NodeId, Vec<Head>>,
    /// Names that clients put, by client and put: the claim's key and home.
    pub claims: BTreeMap<(ClientId, u64), (BlockKey, NodeId)>,
    pub quests: BTreeMap<u64, Quest>,
    pub copying: Copying,
}

impl Cluster {
    /// Nobody is known. Hints are bounded by what a node's memory can hold: names of the smallest objects that fill half of
    /// it, which costs about a fortieth of it.
    pub fn new(me: NodeId, dram_bytes: u64) -> Self {
        let hints = ((dram_bytes / 8192) as usize).max(1 << 16);
        Self {
            known: BTreeMap::new(),
            strangers: Vec::new(),
            listed: Vec::new(),
            ordered: Vec::new(),
            numbers: SELF,
            book: Arc::new(RwLock::new(Book::new(me, hints))),
            view: 0,
            news: Vec::new(),
            tellings: BTreeMap::new(),
            removals: VecDeque::new(),
            anew: None,
            anew_after: 0,
            doubts: BTreeMap::new(),
            claims: BTreeMap::new(),
            quests: BTreeMap::new(),
            copying: Copying::default(),
        }
    }

    /// What this node knows of names and their homes.
    pub fn book(&self) -> RwLockReadGuard<'_, Book> {
        self.book.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// The same, to be changed.
    pub fn book_mut(&self) -> RwLockWriteGuard<'_, Book> {
        self.book.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// The home of a name.
    pub fn home(&self, key: &BlockKey) -> Option<NodeId> {
        self.book().homes.home(key).cloned()
    }

    /// True if there are no other nodes, and none are expected.
    pub fn is_alone(&self) -> bool {
        self.known.is_empty() && self.strangers.is_empty()
    }

    /// Who has joined.
    pub fn others(&self) -> Vec<NodeId> {
        self.book().joined.values().map(|peer| peer.node.clone()).collect()
    }

    /// Where a member is that has joined.
    pub fn address(&self, node: &NodeId) -> Option<&NodeAddress> {
        self.known.get(node).filter(|known| known.number != SELF).map(|known| &known.address)
    }

    fn number(&self, node: &NodeId) -> Option<Member> {
        self.known.get(node).map(|known| known.number).filter(|number| *number != SELF)
    }

    /// Members that should be there and are not, as a person knows them.
    pub fn missing(&self) -> Vec<String> {
        let away = self.known.iter().filter(|(_, known)| known.number == SELF).map(|(node, _)| node.clone());
        away.chain(self.strangers.iter().cloned()).collect()
    }

    /// Whether all have told what they hold may have changed.
    pub fn look_who_told(&self) {
        let mut book = self.book_mut();
        book.told = book.joined.values().all(|peer| self.has_told(peer));
    }

    fn has_told(&self, peer: &NodeAddress) -> bool {
        let Some(known) = self.known.get(&peer.node) else { return false };
        known.told == Some(self.view) && self.anew.is_none_or(|number| known.anew == Some(number))
    }

    /// Who might be told of an object's coming and going.
    pub fn note(&mut self, head: Head, here: bool) {
        if !self.is_alone() {
            self.news.push((head, here));
        }
    }

    /// Nothing is under way on behalf of others, or of a client.
    pub fn is_quiet(&self) -> bool {
        self.quests.is_empty() && self.copying.is_idle()
    }

    /// What is under way, for a person.
    pub fn unfinished(&self) -> impl Iterator<Item = String> {
        let quests = self.quests.values().map(|quest| format!("quest {quest:?}"));
        quests.chain(self.copying.unfinished()).chain(self.claims.iter().map(|claim| format!("claim {claim:?}")))
    }
}

impl Engine {
    /// What this node knows of names and their homes, for other threads.
    pub fn book(&self) -> Arc<RwLock<Book>> {
        self.cluster.book.clone()
    }

    // -- members -----------------------------------------------------------------------------------------------------

    /// The members that the shell keeps sessions with, and the addresses that it has not reached yet.
    pub(super) fn list_members(&mut self, mut known: Vec<NodeAddress>, mut strangers: Vec<String>) {
        known.truncate(MEMBERS);
        strangers.truncate(MEMBERS);
        (self.cluster.listed, self.cluster.strangers) = (known, strangers);
        self.name_members();
    }

    /// The members that the conductor knows.
    pub(super) fn order_members(&mut self, mut members: Vec<NodeAddress>) {
        members.truncate(MEMBERS);
        self.cluster.ordered = members;
        self.name_members();
    }

    fn name_members(&mut self) {
        let (me, now) = (self.node.node.clone(), self.now);
        let cluster = &mut self.cluster;
        cluster.known.values_mut().for_each(|known| known.named = false);
        for address in cluster.listed.iter().chain(&cluster.ordered).filter(|address| address.node != me) {
            let fresh = || Known {
                address: address.clone(),
                named: true,
                number: SELF,
                greeted: 0,
                told: None,
                anew: None,
                redial: now,
                pause: REDIAL.0,
            };
            let known = cluster.known.entry(address.node.clone()).or_insert_with(fresh);
            known.named = true;
            if known.number == SELF && known.address != *address {
                *known = fresh();
            }
        }
        cluster.known.retain(|_, known| known.named || known.number != SELF);
        for node in cluster.known.keys().cloned().collect::<Vec<_>>() {
            self.greet(&node);
        }
        self.homes_moved();
    }

    /// Says once on each session with a member that this node joins.
    fn greet(&mut self, node: &NodeId) {
        let Some(link) = self.links.get(node).filter(|link| link.up) else { return };
        if let Some(known) = self.cluster.known.get_mut(node)
            && known.greeted != link.serial
        {
            (known.greeted, known.address, known.pause) = (link.serial, link.peer.clone(), REDIAL.0);
            self.say(node, PeerMessage::Objects(Talk::Join));
        }
    }

    /// A session stands.
    pub(super) fn member_up(&mut self, node: &NodeId) {
        self.greet(node);
    }

    /// A session is over.
    pub(super) fn member_down(&mut self, node: &NodeId) {
        let now = self.now;
        let Some(known) = self.cluster.known.get_mut(node) else { return };
        (known.redial, known.pause) = (now + known.pause, (known.pause * 2).min(REDIAL.1));
        let number = std::mem::replace(&mut known.number, SELF);
        if !known.named {
            self.cluster.known.remove(node);
        }
        if number != SELF {
            let mut book = self.cluster.book_mut();
            book.joined.remove(&number);
            book.hints.forget(number);
            drop(book);
            self.cluster.tellings.remove(node);
            self.homes_moved();
        }
        self.copies_lost(node);
        self.quests_lost(node);
    }

    fn joins(&mut self, node: &NodeId) {
        let Some(link) = self.links.get(node) else { return };
        if self.cluster.book().joined.len() >= MEMBERS {
            return;
        }
        let (address, now) = (link.peer.clone(), self.now);
        let fresh = Known {
            address,
            named: false,
            number: SELF,
            greeted: 0,
            told: None,
            anew: None,
            redial: now,
            pause: REDIAL.0,
        };
        self.cluster.known.entry(node.clone()).or_insert(fresh);
        self.greet(node);
        let cluster = &mut self.cluster;
        if let Some(known) = cluster.known.get_mut(node)
            && known.number == SELF
        {
            cluster.numbers += 1;
            (known.number, known.told, known.anew) = (cluster.numbers, None, None);
            let (number, address) = (known.number, known.address.clone());
            self.cluster.book_mut().joined.insert(number, address);
            self.homes_moved();
        }
    }

    /// Dials members that the conductor has named. The shell dials those that it has listed.
    pub(super) fn redial_members(&mut self) {
        let now = self.now;
        let due = |address: &&NodeAddress| {
            let known = self.cluster.known.get(&address.node);
            known.is_some_and(|known| known.number == SELF && known.redial <= now)
                && !self.links.contains_key(&address.node)
        };
        for address in self.cluster.ordered.iter().filter(due).cloned().collect::<Vec<_>>() {
            if let Some(known) = self.cluster.known.get_mut(&address.node) {
                (known.redial, known.pause) = (now + known.pause, (known.pause * 2).min(REDIAL.1));
            }
            let link = self.new_link(address.clone());
            self.links.insert(address.node.clone(), link);
            self.out.push(Output::Dial { peer: address });
        }
    }

    /// The set of homes may be another one now.
    fn homes_moved(&mut self) {
        let me = self.node.clone();
        let joined: Vec<NodeAddress> = self.cluster.book().joined.values().cloned().collect();
        let mut all: Vec<(&NodeId, u64)> =
            joined.iter().chain([&me]).map(|member| (&member.node, member.incarnation)).collect();
        all.sort_unstable();
        let alone = self.cluster.is_alone();
        let homes = Homes::new(all.iter().filter(|_| !alone).map(|(node, _)| (*node).clone()));
        let mut text = String::new();
        all.iter().for_each(|(node, life)| text.push_str(&format!("{node} {life}\n")));
        let view = seed(&text);
        self.objects.catalog.set_elsewhere(!joined.is_empty());
        if (&homes, view) == (&self.cluster.book().homes, self.cluster.view) {
            return;
        }
        self.cluster.view = view;
        let mut book = self.cluster.book_mut();
        let before = std::mem::replace(&mut book.homes, homes.clone());
        // Whoever has not told anew by now may have told of its homes before it heard that it shall.
        if self.cluster.anew.is_some() && !book.told {
            book.hints.end_anew();
        }
        book.hints.keep(|key| homes.home(key) == Some(&me.node));
        drop(book);
        self.cluster.anew = None;
        self.cluster.look_who_told();
        // Whose home is another one now, that one is told; all of them that this was all.
        for peer in &joined {
            self.cluster.tellings.entry(peer.node.clone()).or_default().ended = false;
        }
        for head in self.own_heads() {
            let (old, new) = (before.home(&head.key), homes.home(&head.key));
            if old == new {
                continue;
            }
            match new {
                Some(node) if *node == me.node => self.hear(SELF, head, true),
                Some(node) => {
                    if let Some(telling) = self.cluster.tellings.get_mut(node) {
                        telling.rest.push_back(head.key);
                    }
                }
                None => {}
            }
        }
    }

    // -- what is held ------------------------------------------------------------------------------------------------

    /// An object of this node.
    pub(super) fn own_head(&self, key: &BlockKey) -> Option<Head> {
        let Entry { dram, head, class, .. } = self.objects.catalog.find(key).filter(|entry| entry.head)?;
        let place = match dram {
            Some((region, slot)) => {
                let store = self.stores.iter().find(|store| store.region == region)?;
                store.pool.published_within(slot.slot, 1).next()?.place
            }
            None => self.tier_record(key, class.layout())?.place,
        };
        head.then_some(Head { key: *key, value: place.parent, class: class.number() })
    }

    /// All of them.
    pub(super) fn own_heads(&self) -> Vec<Head> {
        let mut heads = Vec::new();
        for store in self.stores.iter().filter(|store| store.objects) {
            let Some(class) = Class::of(store.layout()) else { continue };
            let places = store.pool.published().filter(|place| place.position == 0);
            heads.extend(places.map(|place| Head { key: place.key, value: place.parent, class: class.number() }));
        }
        let behind = self.tier_records().filter(|record| is_object(record) && record.place.position == 0);
        let behind = behind.filter_map(|record| {
            let (place, class) = (record.place, Class::of(record.layout)?);
            // What is in DRAM too has been seen.
            let entry = self.objects.catalog.find(&place.key)?;
            entry.dram.is_none().then_some(Head { key: place.key, value: place.parent, class: class.number() })
        });
        heads.extend(behind);
        heads
    }

    /// Drops an object of this node, if it is that one. True: it was here.
    fn drop_own(&mut self, key: &BlockKey, value: &BlockKey) -> bool {
        let here = self.own_head(key).is_some_and(|head| head.value == *value);
        here && self.remove_object(key)
    }

    /// An object was removed from the whole cluster: it goes, and does not come back. True: it was here.
    pub(super) fn remove_for_good(&mut self, key: BlockKey, value: BlockKey) -> bool {
        self.cluster.book_mut().hints.remove(key, value);
        self.drop_own(&key, &value)
    }

    /// As a home that is told of a removal: who removes may have no session with a holder, of whom nothing will be known
    /// here after this. So it is told from here too, but later: a holder says only once that it had one, and that is for who removes.
    fn pass_removal(&mut self, by: &NodeId, objects: &[(BlockKey, BlockKey)]) {
        let mut drops: BTreeMap<NodeId, Vec<(BlockKey, BlockKey)>> = BTreeMap::new();
        for (key, value) in objects {
            let hinted = self.cluster.book().hinted(key).filter(|(head, _)| head.value == *value);
            for holder in hinted.into_iter().flat_map(|(_, holders)| holders) {
                if holder != *by && holder != self.node.node {
                    drops.entry(holder).or_default().push((*key, *value));
                }
            }
        }
        for (holder, objects) in drops {
            self.cluster.removals.push_back((self.now + PASS_AFTER, holder, objects));
        }
    }

    /// Tells holders of removals whose time has come.
    pub(super) fn pass_removals(&mut self) {
        let due = |cluster: &Cluster| {
            let full = cluster.removals.len() > PASSED;
            cluster.removals.front().is_some_and(|(at, ..)| full || *at <= self.now)
        };
        let mut told = Vec::new();
        while due(&self.cluster) {
            told.extend(self.cluster.removals.pop_front());
        }
        // One who is gone is told when it comes back.
        for (_, holder, objects) in told {
            if self.cluster.address(&holder).is_some() {
                self.say(&holder, PeerMessage::Objects(Talk::Drop { objects }));
            }
        }
    }

    // -- telling homes -----------------------------------------------------------------------------------------------

    /// A member holds an object, or no more.
    pub(super) fn hear(&mut self, member: Member, head: Head, here: bool) {
        let mut book = self.cluster.book_mut();
        if !here {
            return book.hints.gone(member, &head.key);
        }
        book.hints.unclaim(member, &head.key);
        let heard = book.here(member, head);
        drop(book);
        let Heard::Drop(value, members) = heard else { return };
        for member in members {
            let peer = self.cluster.book().joined.get(&member).map(|peer| peer.node.clone());
            match peer {
                Some(node) => {
                    let objects = vec![(head.key, value)];
                    self.say(&node, PeerMessage::Objects(Talk::Drop { objects }));
                }
                None if member == SELF => {
                    self.drop_own(&head.key, &value);
                }
                None => {}
            }
        }
    }

    /// After every input: tells homes what has come and gone, and goes on to tell new ones what there is.
    pub(super) fn tell_homes(&mut self) {
        self.check_hints();
        let mut rounds = 0;
        while !self.cluster.news.is_empty() {
            let mut told: BTreeMap<NodeId, Vec<(Head, bool)>> = BTreeMap::new();
            for (head, here) in std::mem::take(&mut self.cluster.news) {
                match self.cluster.home(&head.key) {
                    Some(node) if node == self.node.node => self.hear(SELF, head, here),
                    Some(node) => told.entry(node).or_default().push((head, here)),
                    None => {}
                }
            }
            for (node, news) in told {
                for news in news.chunks(PART) {
                    let news = Talk::Told { news: news.to_vec(), all: None, heard: false };
                    self.say(&node, PeerMessage::Objects(news));
                }
            }
            // What this node's own home has made it drop is news too, of which nothing follows.
            self.note_objects();
            rounds += 1;
            debug_assert!(rounds < 10, "news of news");
        }
        for node in self.cluster.tellings.keys().cloned().collect::<Vec<_>>() {
            self.tell_on(&node);
        }
    }

    fn tell_on(&mut self, node: &NodeId) {
        loop {
            let Some(telling) = self.cluster.tellings.get_mut(node) else { return };
            if telling.ended || telling.unheard >= PARTS {
                return;
            }
            let part: Vec<BlockKey> = telling.rest.drain(..telling.rest.len().min(PART)).collect();
            let last = telling.rest.is_empty();
            telling.unheard += 1;
            let anew = telling.anew.take_if(|_| last);
            telling.ended = last && anew.is_none();
            // If homes have moved again meanwhile, others are told of some. One that is told of names that are not its own would
            // believe in them for ever, as their end is told to their homes.
            let its = |key: &&BlockKey| self.cluster.book().homes.home(key) == Some(node);
            let heads = part.iter().filter(its).filter_map(|key| self.own_head(key));
            let news: Vec<(Head, bool)> = heads.map(|head| (head, true)).collect();
            let all = last.then(|| anew.unwrap_or(self.cluster.view));
            self.say(node, PeerMessage::Objects(Talk::Told { news, all, heard: true }));
        }
    }

    // -- what members say --------------------------------------------------------------------------------------------

    pub(super) fn talk(&mut self, node: &NodeId, talk: Talk) {
        if talk == Talk::Join {
            return self.joins(node);
        }
        let Some(number) = self.cluster.number(node) else { return };
        match talk {
            // Those two have connections of their own.
            Talk::Join | Talk::Exist { .. } | Talk::Existing { .. } => {}
            Talk::Told { news, all, heard } => {
                news.into_iter().for_each(|(head, here)| self.hear(number, head, here));
                if let Some(known) = self.cluster.known.get_mut(node)
                    && all.is_some()
                {
                    *(if all == self.cluster.anew { &mut known.anew } else { &mut known.told }) = all;
                    self.cluster.look_who_told();
                }
                if heard {
                    self.say(node, PeerMessage::Objects(Talk::Heard));
                }
            }
            Talk::Heard => {
                if let Some(telling) = self.cluster.tellings.get_mut(node) {
                    telling.unheard = telling.unheard.saturating_sub(1);
                }
            }
            Talk::Claim { ticket, keys } => {
                let permits = keys.iter().map(|key| self.permit(number, *key)).collect();
                self.say(node, PeerMessage::Objects(Talk::Claimed { ticket, permits }));
            }
            Talk::Unclaim { keys } => {
                let mut book = self.cluster.book_mut();
                keys.iter().for_each(|key| book.hints.unclaim(number, key));
            }
            Talk::Where { ticket, keys, own } => {
                let spots = keys.iter().map(|key| if own { self.own_spot(key) } else { self.spot(key) }).collect();
                self.say(node, PeerMessage::Objects(Talk::There { ticket, spots }));
            }
            Talk::Remove { ticket, objects } => {
                self.pass_removal(node, &objects);
                let removed = objects.into_iter().map(|(key, value)| self.remove_for_good(key, value)).collect();
                self.say(node, PeerMessage::Objects(Talk::Removed { ticket, removed }));
            }
            Talk::Drop { objects } => objects.iter().for_each(|(key, value)| {
                self.drop_own(key, value);
            }),
            Talk::Claimed { ticket, permits } => self.quest_permits(ticket, node, permits),
            Talk::There { ticket, spots } => self.quest_spots(ticket, node, spots),
            Talk::Removed { ticket, removed } => self.quest_removed(ticket, node, &removed),
            Talk::Copied { ticket, ended } => self.quest_copied(ticket, node, &ended),
            Talk::Copy { ticket, objects } => self.copy_for_peer(node, ticket, objects),
            Talk::Parts { ticket, head } => {
                let parts = self.own_head(&head.key).filter(|own| *own == head).map(|_| self.parts_of(&head.key));
                self.say(node, PeerMessage::Objects(Talk::PartsOf { ticket, parts }));
            }
            Talk::PartsOf { ticket, parts } => self.copy_parts(ticket, node, parts),
            Talk::Doubt { head, holder } => self.doubted(head, &holder),
            Talk::Anew { number } => self.tell_anew(node, number),
            Talk::Check { heads } => self.answer_check(node, heads),
        }
    }

    /// Keys of an object's blocks behind the head.
    pub(super) fn parts_of(&self, key: &BlockKey) -> Vec<BlockKey> {
        self.objects.chunks.get(key).cloned().unwrap_or_default()
    }

    /// As the home of a name: may a member put it?
    pub(super) fn permit(&mut self, member: Member, key: BlockKey) -> Permit {
        let mut book = self.cluster.book_mut();
        let sure = book.is_sure();
        let claim = book.claim(member, key);
        drop(book);
        match claim {
            Claim::Taken => {
                self.doubt_hint(&key);
                Permit::Taken
            }
            Claim::Free if sure => Permit::Free,
            Claim::Free => Permit::Unsure,
        }
    }

    /// What this node knows of a name, as its home.
    pub(super) fn spot(&self, key: &BlockKey) -> Spot {
        let (spot, own) = (self.cluster.book().spot(key), self.own_spot(key));
        // What is here is here, whatever is believed of names whose home is elsewhere.
        let other = own.head.is_some() && own.head != spot.head;
        if spot.head.is_some() && !other { spot } else { Spot { sure: spot.sure, ..own } }
    }

    /// What this node has of a name itself.
    fn own_spot(&self, key: &BlockKey) -> Spot {
        let head = self.own_head(key);
        Spot { holders: head.iter().map(|_| self.node.node.clone()).collect(), head, sure: false }
    }

    pub(super) fn check_cluster(&self) {
        let cluster = &self.cluster;
        let book = cluster.book();
        book.hints.check();
        for (number, peer) in &book.joined {
            let node = &peer.node;
            assert_eq!(cluster.number(node), Some(*number), "{node} has joined");
            assert!(self.links.get(node).is_some_and(|link| link.up), "{node} has joined without a session");
        }
        assert!(cluster.tellings.keys().all(|node| cluster.number(node).is_some()), "telling somebody who is gone");
        assert!(cluster.news.is_empty(), "news that nobody is told");
        assert!(cluster.doubts.is_empty(), "doubts of which nobody is asked");
        assert_eq!(book.told, book.joined.values().all(|peer| cluster.has_told(peer)), "who has told all");
        // This node knows of its own objects as well as of others'.
        for head in self.own_heads() {
            if book.is_home(&head.key) && book.hints.complete() {
                let (hinted, holders) = book.hinted(&head.key).expect("its home knows it");
                let full = holders.len() >= 7;
                assert!(hinted == head && (full || holders.contains(&self.node.node)), "{hinted:?} is not {head:?}");
            }
        }
    }
}
