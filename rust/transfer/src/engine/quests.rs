//! What clients ask of objects that may lie on other nodes, on its way through the cluster.
//!
//! ```text
//! exists, bring, copies:           ask the homes: who has these? --> not all sure? ask all others --> go on with what is known
//! reserve:                         claim the names at their homes --> not all sure? ask all others --> reserve what is free
//! remove:                          ask all: who has these? --> tell all to drop what was found --> answered by all: done
//! copies, then:                    tell who shall have them to take them --> told as they arrive
//! ```
//!
//! Who does not answer, or is lost, is gone on without: a question ends within a few seconds, whatever happens.

use std::collections::BTreeMap;

use crate::messages::{LocalEvent, PeerMessage, Refusal, Ticket};
use crate::objects::hints::{Head, SELF};
use crate::objects::messages::{ObjectEvent, Reserved, Wanted};
use crate::objects::talk::{Permit, Spot, Talk, ToCopy};
use crate::types::{BlockKey, ClientId, Medium, Nanos, NodeId};

use super::cluster::Cluster;
use super::copying::Asker;
use super::{Engine, SECOND};

/// How long members may take to answer, all steps of a question together: they answer in microseconds, and the client waits
/// for ten seconds.
const ANSWER_WITHIN: Nanos = 3 * SECOND;
/// How long nothing may be heard of copies under way.
const COPY_WITHIN: Nanos = 10 * SECOND;

/// What is to be done with what is found.
#[derive(Clone, Debug)]
pub(super) enum Goal {
    /// Tell the client: `media` has what is here, in the order of its keys; the others are the quest's keys.
    Exists { client: ClientId, ticket: Ticket, media: Vec<Option<Medium>> },
    /// Reserve what may be put. The quest's keys are those of the heads among them that are not here.
    Reserve { client: ClientId, ticket: Ticket, wanted: Vec<Wanted> },
    /// Remove them everywhere.
    Remove { client: ClientId, ticket: Ticket, removed: Vec<bool>, missing: Vec<String> },
    /// See to it that so many nodes have each.
    Copies { client: ClientId, ticket: Ticket, wanted: u32, have: Vec<u32> },
    /// Bring them here. Per key: its place in the bring.
    Bring { client: ClientId, bring: u64, places: Vec<(usize, Wanted)> },
    /// As `Copies`, told to nobody.
    Spread { wanted: u32 },
    /// Bring them here, told to nobody.
    Come,
    /// See to it that another node has each.
    Leave { moved: u64 },
}

impl Goal {
    fn client(&self) -> Option<ClientId> {
        match self {
            Self::Exists { client, .. }
            | Self::Reserve { client, .. }
            | Self::Remove { client, .. }
            | Self::Copies { client, .. }
            | Self::Bring { client, .. } => Some(*client),
            Self::Spread { .. } | Self::Come | Self::Leave { .. } => None,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// The homes are asked.
    Homes,
    /// The homes are asked for permission.
    Claims,
    /// All are asked for what the homes are not sure of.
    All,
    /// All are told to drop what was found.
    Removal,
    /// Some are told to take copies.
    Copies,
}

/// A question under way.
#[derive(Clone, Debug)]
pub(super) struct Quest {
    goal: Goal,
    stage: Stage,
    keys: Vec<BlockKey>,
    /// Per key.
    found: Vec<Spot>,
    /// Other values of these names, of which all are to be removed: places in `keys`.
    more: Vec<(usize, Head)>,
    permits: Vec<Permit>,
    /// Where each key was claimed.
    claimed_at: Vec<Option<NodeId>>,
    /// What is still to be answered by whom: places in `keys`.
    awaited: BTreeMap<NodeId, Vec<Option<usize>>>,
    until: Nanos,
}

impl Engine {
    // -- what clients ask --------------------------------------------------------------------------------------------

    /// Which of these are anywhere?
    pub(super) fn object_exists(&mut self, client: ClientId, ticket: Ticket, keys: &[BlockKey]) {
        let media = self.objects.catalog.contains(keys);
        let missing = keys.iter().zip(&media).filter(|(_, medium)| medium.is_none()).map(|(key, _)| *key).collect();
        self.begin_quest(Goal::Exists { client, ticket, media }, missing, Stage::Homes);
    }

    /// Reserves blocks; the names among them are claimed first.
    pub(super) fn object_reserve(&mut self, client: ClientId, ticket: Ticket, wanted: Vec<Wanted>) {
        let free = |wanted: &&Wanted| wanted.index == 0 && self.objects.catalog.find(&wanted.key).is_none();
        let ask = !self.cluster.is_alone() && !self.is_draining();
        let names: Vec<BlockKey> = wanted.iter().filter(|_| ask).filter(free).map(|wanted| wanted.key).collect();
        self.begin_quest(Goal::Reserve { client, ticket, wanted }, names, Stage::Claims);
    }

    /// Removes objects, wherever they are.
    pub(super) fn object_remove(&mut self, client: ClientId, ticket: Ticket, keys: Vec<BlockKey>) {
        if self.cluster.is_alone() {
            let removed = keys.iter().map(|key| self.remove_object(key)).collect();
            let event = ObjectEvent::Removed { ticket, removed, missing: Vec::new() };
            return self.tell(client, LocalEvent::Objects(event));
        }
        let (removed, missing) = (vec![false; keys.len()], self.cluster.missing());
        // A name may have two values that have not met, and a home may not know all who have them.
        self.begin_quest(Goal::Remove { client, ticket, removed, missing }, keys, Stage::All);
    }

    /// Sees to it that so many nodes have each of these.
    pub(super) fn object_copies(&mut self, client: ClientId, ticket: Ticket, keys: Vec<BlockKey>, wanted: u32) {
        let have = vec![0; keys.len()];
        self.begin_quest(Goal::Copies { client, ticket, wanted, have }, keys, Stage::Homes);
    }

    /// Begins what will be asked for.
    pub(super) fn objects_spread(&mut self, keys: Vec<BlockKey>, wanted: u32) {
        if !self.cluster.is_alone() {
            self.begin_quest(Goal::Spread { wanted }, keys, Stage::Homes);
        }
    }

    /// The same for what will be read.
    pub(super) fn objects_expected(&mut self, keys: Vec<BlockKey>) {
        let missing = |key: &BlockKey| self.objects.catalog.find(key).is_none();
        let keys: Vec<BlockKey> = keys.into_iter().filter(missing).collect();
        if self.objects.catalog.is_elsewhere() {
            self.begin_quest(Goal::Come, keys, Stage::Homes);
        }
    }

    /// Brings objects here, from whoever has them.
    pub(super) fn objects_come(&mut self, client: ClientId, bring: u64, places: Vec<(usize, Wanted)>) {
        let keys = places.iter().map(|(_, wanted)| wanted.key).collect();
        self.begin_quest(Goal::Bring { client, bring, places }, keys, Stage::Homes);
    }

    /// Sees to it that another node has each of these.
    pub(super) fn objects_leave(&mut self, keys: Vec<BlockKey>) {
        self.begin_quest(Goal::Leave { moved: 0 }, keys, Stage::Homes);
    }

    // -- the way of a question ---------------------------------------------------------------------------------------

    fn begin_quest(&mut self, goal: Goal, keys: Vec<BlockKey>, stage: Stage) {
        let count = keys.len();
        let mut quest = Quest {
            goal,
            stage,
            keys,
            found: vec![Spot::default(); count],
            more: Vec::new(),
            permits: vec![Permit::Free; count],
            claimed_at: vec![None; count],
            awaited: BTreeMap::new(),
            until: self.now + ANSWER_WITHIN,
        };
        if self.quests_are_full() && count > 0 {
            return self.turn_quest_away(quest);
        }
        let number = self.number();
        for (at, key) in quest.keys.iter().enumerate() {
            if stage == Stage::All {
                quest.found[at] = self.spot(key);
                continue;
            }
            match self.cluster.home(key) {
                None => quest.found[at] = self.spot(key),
                Some(home) if home == self.node.node && stage == Stage::Claims => {
                    quest.permits[at] = self.permit(SELF, *key);
                    quest.claimed_at[at] = Some(home);
                }
                Some(home) if home == self.node.node => quest.found[at] = self.spot(key),
                Some(home) => {
                    quest.claimed_at[at] = Some(home.clone());
                    quest.awaited.entry(home).or_default().push(Some(at));
                }
            }
        }
        if stage == Stage::All {
            let all: Vec<Option<usize>> = (0..count).map(Some).collect();
            quest.awaited = self.cluster.others().into_iter().map(|node| (node, all.clone())).collect();
        }
        for (node, places) in &quest.awaited {
            let (ticket, keys) = (number, quest.keys_at(places));
            let ask = if stage == Stage::Claims {
                Talk::Claim { ticket, keys }
            } else {
                Talk::Where { ticket, keys, own: false }
            };
            self.say(node, PeerMessage::Objects(ask));
        }
        self.quest_on(number, quest);
    }

    /// Goes on if nothing is awaited.
    fn quest_on(&mut self, number: u64, mut quest: Quest) {
        while quest.awaited.is_empty() {
            match quest.stage {
                Stage::Homes | Stage::Claims => {
                    let unsure = |at: &usize| {
                        let spot = &quest.found[*at];
                        spot.head.is_none()
                            && match quest.stage {
                                Stage::Claims => quest.permits[*at] == Permit::Unsure,
                                _ => !spot.sure,
                            }
                    };
                    let places: Vec<Option<usize>> = (0..quest.keys.len()).filter(unsure).map(Some).collect();
                    quest.stage = Stage::All;
                    if places.is_empty() || quest.until <= self.now {
                        continue;
                    }
                    for node in self.cluster.others() {
                        let keys = quest.keys_at(&places);
                        self.say(&node, PeerMessage::Objects(Talk::Where { ticket: number, keys, own: true }));
                        quest.awaited.insert(node, places.clone());
                    }
                }
                Stage::All => match &mut quest.goal {
                    Goal::Remove { .. } => self.begin_removal(number, &mut quest),
                    Goal::Copies { .. } | Goal::Spread { .. } | Goal::Leave { .. } => {
                        self.begin_copies(number, &mut quest)
                    }
                    Goal::Exists { .. } | Goal::Reserve { .. } | Goal::Bring { .. } | Goal::Come => {
                        return self.end_quest(quest);
                    }
                },
                Stage::Removal | Stage::Copies => return self.end_quest(quest),
            }
        }
        self.cluster.quests.insert(number, quest);
    }

    fn begin_removal(&mut self, number: u64, quest: &mut Quest) {
        quest.stage = Stage::Removal;
        quest.until = self.now + ANSWER_WITHIN;
        let missing = self.cluster.missing();
        if let Goal::Remove { missing: known, .. } = &mut quest.goal {
            known.extend(missing);
        }
        let heads = (0..).zip(&quest.found).filter_map(|(at, spot)| Some((at, spot.head?)));
        let heads: Vec<(usize, Head)> = heads.chain(std::mem::take(&mut quest.more)).collect();
        if heads.is_empty() {
            return;
        }
        let objects: Vec<(BlockKey, BlockKey)> = heads.iter().map(|(_, head)| (head.key, head.value)).collect();
        for node in self.cluster.others() {
            let objects = objects.clone();
            self.say(&node, PeerMessage::Objects(Talk::Remove { ticket: number, objects }));
            quest.awaited.insert(node, heads.iter().map(|(at, _)| Some(*at)).collect());
        }
        for (at, head) in heads {
            let here = self.remove_for_good(head.key, head.value);
            if let Goal::Remove { removed, .. } = &mut quest.goal {
                removed[at] |= here;
            }
        }
    }

    fn begin_copies(&mut self, number: u64, quest: &mut Quest) {
        quest.stage = Stage::Copies;
        let me = self.node.node.clone();
        let mut orders: BTreeMap<NodeId, (Vec<ToCopy>, Vec<Option<usize>>)> = BTreeMap::new();
        for (at, spot) in quest.found.iter().enumerate() {
            let Some(head) = spot.head else { continue };
            let ranked =
                self.cluster.book().homes.ranked(&head.key).into_iter().filter(|node| !spot.holders.contains(node));
            let more = match &mut quest.goal {
                Goal::Copies { wanted, have, .. } => {
                    have[at] = spot.holders.len() as u32;
                    wanted.saturating_sub(have[at]) as usize
                }
                Goal::Spread { wanted } => wanted.saturating_sub(spot.holders.len() as u32) as usize,
                Goal::Leave { .. } => usize::from(spot.holders == [me.clone()]),
                _ => 0,
            };
            let here = self.own_head(&head.key) == Some(head);
            for node in ranked.take(more) {
                let parts = here.then(|| self.parts_of(&head.key));
                let from = from_turn(&head, spot.holders.clone());
                let (objects, places) = orders.entry(node).or_default();
                objects.push(ToCopy { head, parts, from });
                places.push(Some(at));
            }
        }
        if !orders.is_empty() {
            quest.until = self.now + COPY_WITHIN;
        }
        for (node, (objects, places)) in orders {
            quest.awaited.insert(node.clone(), places);
            if node == me {
                self.take_copies(Asker::Quest(number), objects);
            } else {
                self.say(&node, PeerMessage::Objects(Talk::Copy { ticket: number, objects }));
            }
        }
    }

    fn end_quest(&mut self, quest: Quest) {
        let Quest { goal, keys, found, permits, claimed_at, .. } = quest;
        match goal {
            Goal::Exists { client, ticket, mut media } => {
                let mut found = found.into_iter().map(|spot| spot.head.map(|_| Medium::Dram));
                media.iter_mut().filter(|medium| medium.is_none()).for_each(|medium| *medium = found.next().flatten());
                self.tell(client, LocalEvent::Objects(ObjectEvent::Contained { ticket, found: media }));
            }
            Goal::Reserve { client, ticket, wanted } => {
                let mut names = keys.into_iter().zip(permits).zip(found).zip(claimed_at).peekable();
                let mut blocks = Vec::with_capacity(wanted.len());
                for wanted in wanted {
                    let this = |name: &(((BlockKey, _), _), _)| wanted.index == 0 && name.0.0.0 == wanted.key;
                    let Some((((key, permit), spot), home)) = names.next_if(this) else {
                        blocks.push(self.reserve(client, wanted));
                        continue;
                    };
                    let taken = permit == Permit::Taken || spot.head.is_some();
                    let reserved = if taken { Reserved::There } else { self.reserve(client, wanted) };
                    let Some(home) = home.filter(|_| permit != Permit::Taken) else {
                        blocks.push(reserved);
                        continue;
                    };
                    if matches!(reserved, Reserved::Slot { .. }) {
                        self.cluster.claims.insert((client, wanted.put), (key, home));
                    } else {
                        self.unclaim(&home, key);
                    }
                    blocks.push(reserved);
                }
                self.tell(client, LocalEvent::Objects(ObjectEvent::Reserved { ticket, blocks }));
            }
            Goal::Remove { client, ticket, removed, mut missing } => {
                missing.sort_unstable();
                missing.dedup();
                self.tell(client, LocalEvent::Objects(ObjectEvent::Removed { ticket, removed, missing }));
            }
            Goal::Copies { client, ticket, have, .. } => {
                self.tell(client, LocalEvent::Objects(ObjectEvent::Copies { ticket, copies: have }));
            }
            Goal::Bring { bring, places, .. } => {
                for (place, spot) in places.into_iter().zip(found) {
                    match spot.head {
                        Some(head) => {
                            let from = from_turn(&head, spot.holders);
                            self.take_copies(Asker::Bring(bring, place), vec![ToCopy { head, parts: None, from }]);
                        }
                        None => self.bring_came(bring, &place, Err(Refusal::Missing)),
                    }
                }
            }
            Goal::Come => {
                for head in found.into_iter().filter_map(|spot| Some((spot.head?, spot.holders))) {
                    let (head, from) = (head.0, from_turn(&head.0, head.1));
                    self.take_copies(Asker::Nobody, vec![ToCopy { head, parts: None, from }]);
                }
            }
            Goal::Spread { .. } => {}
            Goal::Leave { moved } => self.left_some(moved),
        }
    }

    /// No more are begun.
    pub(super) fn quests_are_full(&self) -> bool {
        self.cluster.quests.len() >= self.settings.fetches
    }

    /// There are too many already.
    fn turn_quest_away(&mut self, mut quest: Quest) {
        match &mut quest.goal {
            Goal::Reserve { client, ticket, wanted } => {
                let blocks = vec![Reserved::Refused(Refusal::Full); wanted.len()];
                let event = ObjectEvent::Reserved { ticket: *ticket, blocks };
                let client = *client;
                return self.tell(client, LocalEvent::Objects(event));
            }
            // Nothing was done, and nothing is known.
            Goal::Exists { client, ticket, .. }
            | Goal::Remove { client, ticket, .. }
            | Goal::Copies { client, ticket, .. } => {
                let (client, event) = (*client, ObjectEvent::Busy { ticket: *ticket });
                return self.tell(client, LocalEvent::Objects(event));
            }
            // It is not known that there are none.
            Goal::Bring { bring, places, .. } => {
                let (bring, places) = (*bring, std::mem::take(places));
                return places.iter().for_each(|place| self.bring_came(bring, place, Err(Refusal::Full)));
            }
            Goal::Spread { .. } | Goal::Come | Goal::Leave { .. } => {}
        }
        self.end_quest(quest);
    }

    // -- answers -----------------------------------------------------------------------------------------------------

    pub(super) fn quest_spots(&mut self, number: u64, node: &NodeId, spots: Vec<Spot>) {
        let Some(mut quest) = self.take_quest(number, node, &[Stage::Homes, Stage::All]) else { return };
        let places = quest.awaited.remove(node).unwrap_or_default();
        let removes = matches!(quest.goal, Goal::Remove { .. });
        for (at, spot) in places.into_iter().flatten().zip(spots) {
            let known = &mut quest.found[at];
            match (known.head, spot.head) {
                (Some(mine), Some(its)) if mine.value == its.value => known.holders.extend(spot.holders),
                (None, _) => *known = spot,
                (Some(_), Some(other)) if removes && !quest.more.contains(&(at, other)) => quest.more.push((at, other)),
                _ => {}
            }
        }
        self.quest_on(number, quest);
    }

    pub(super) fn quest_permits(&mut self, number: u64, node: &NodeId, permits: Vec<Permit>) {
        let Some(mut quest) = self.take_quest(number, node, &[Stage::Claims]) else {
            // Nobody waits for them any more: whoever did has taken them back.
            return;
        };
        let places = quest.awaited.remove(node).unwrap_or_default();
        places.into_iter().flatten().zip(permits).for_each(|(at, permit)| quest.permits[at] = permit);
        self.quest_on(number, quest);
    }

    pub(super) fn quest_removed(&mut self, number: u64, node: &NodeId, bits: &[bool]) {
        let Some(mut quest) = self.take_quest(number, node, &[Stage::Removal]) else { return };
        let places = quest.awaited.remove(node).unwrap_or_default();
        if let Goal::Remove { removed, .. } = &mut quest.goal {
            places.into_iter().flatten().zip(bits).for_each(|(at, bit)| removed[at] |= bit);
        }
        self.quest_on(number, quest);
    }

    /// Some copies have ended, at another node or at this one.
    pub(super) fn quest_copied(&mut self, number: u64, node: &NodeId, ended: &[(u32, bool)]) {
        let Some(mut quest) = self.take_quest(number, node, &[Stage::Copies]) else { return };
        quest.until = self.now + COPY_WITHIN;
        let Some(places) = quest.awaited.get_mut(node) else { return };
        for (place, good) in ended {
            let Some(at) = places.get_mut(*place as usize).and_then(Option::take) else { continue };
            match &mut quest.goal {
                Goal::Copies { have, .. } => have[at] += u32::from(*good),
                Goal::Leave { moved } => *moved += u64::from(*good),
                _ => {}
            }
        }
        if places.iter().all(Option::is_none) {
            quest.awaited.remove(node);
        }
        self.quest_on(number, quest);
    }

    fn take_quest(&mut self, number: u64, node: &NodeId, stages: &[Stage]) -> Option<Quest> {
        let meant = |quest: &&Quest| stages.contains(&quest.stage) && quest.awaited.contains_key(node);
        self.cluster.quests.get(&number).filter(meant)?;
        self.cluster.quests.remove(&number)
    }

    // -- ends --------------------------------------------------------------------------------------------------------

    /// A member is gone: nothing more is answered by it.
    pub(super) fn quests_lost(&mut self, node: &NodeId) {
        let waiting = self.cluster.quests.iter().filter(|(_, quest)| quest.awaited.contains_key(node));
        for number in waiting.map(|(number, _)| *number).collect::<Vec<_>>() {
            let Some(mut quest) = self.cluster.quests.remove(&number) else { continue };
            quest.lose(node);
            self.quest_on(number, quest);
        }
    }

    /// Those that have waited too long go on with what they know.
    pub(super) fn quests_late(&mut self) {
        let late = self.cluster.quests.iter().filter(|(_, quest)| quest.until <= self.now);
        for number in late.map(|(number, _)| *number).collect::<Vec<_>>() {
            let Some(mut quest) = self.cluster.quests.remove(&number) else { continue };
            for node in quest.awaited.keys().cloned().collect::<Vec<_>>() {
                quest.lose(&node);
            }
            self.quest_on(number, quest);
        }
    }

    /// The client is gone, and wants nothing more.
    pub(super) fn client_quests_gone(&mut self, client: ClientId) {
        let its = self.cluster.quests.iter().filter(|(_, quest)| quest.goal.client() == Some(client));
        for number in its.map(|(number, _)| *number).collect::<Vec<_>>() {
            let Some(quest) = self.cluster.quests.remove(&number) else { continue };
            if !matches!(quest.goal, Goal::Reserve { .. }) {
                continue;
            }
            // What is not answered yet is taken back behind its claim.
            for ((key, permit), home) in quest.keys.into_iter().zip(quest.permits).zip(quest.claimed_at) {
                if let Some(home) = home.filter(|_| permit != Permit::Taken) {
                    self.unclaim(&home, key);
                }
            }
        }
    }

    fn unclaim(&mut self, home: &NodeId, key: BlockKey) {
        if *home == self.node.node {
            self.cluster.book_mut().hints.unclaim(SELF, &key);
        } else if self.cluster.address(home).is_some() {
            // One who is gone has forgotten it.
            self.say(home, PeerMessage::Objects(Talk::Unclaim { keys: vec![key] }));
        }
    }

    /// A put has ended. `told`: with an object, of which the name's home is told, and then the claim is over there.
    pub(super) fn claim_over(&mut self, client: ClientId, put: u64, told: bool) {
        let Some((key, home)) = self.cluster.claims.remove(&(client, put)) else { return };
        if !(told && self.cluster.home(&key).as_ref() == Some(&home)) {
            self.unclaim(&home, key);
        }
    }
}

/// Holders in the order in which they are asked: not all of the first one.
fn from_turn(head: &Head, mut holders: Vec<NodeId>) -> Vec<NodeId> {
    let turn = usize::from(head.key.0[8]) % holders.len().max(1);
    holders.rotate_left(turn);
    holders
}

impl Cluster {
    /// Objects that are still to leave, or are on their way.
    pub fn leaving(&self) -> usize {
        let goes = |quest: &Quest| if matches!(quest.goal, Goal::Leave { .. }) { quest.keys.len() } else { 0 };
        self.copying.to_leave() + self.quests.values().map(goes).sum::<usize>()
    }

    /// True while some objects leave.
    pub fn quests_leave(&self) -> bool {
        self.quests.values().any(|quest| matches!(quest.goal, Goal::Leave { .. }))
    }
}

impl Quest {
    fn keys_at(&self, places: &[Option<usize>]) -> Vec<BlockKey> {
        places.iter().flatten().map(|at| self.keys[*at]).collect()
    }

    /// Somebody will not answer.
    fn lose(&mut self, node: &NodeId) {
        let places = self.awaited.remove(node).unwrap_or_default();
        if let Goal::Remove { missing, .. } = &mut self.goal {
            // It may have what it has not said, or not been told.
            missing.push(node.clone());
        }
        if self.stage == Stage::Claims {
            // All others are asked instead.
            places.into_iter().flatten().for_each(|at| self.permits[at] = Permit::Unsure);
        }
    }
}
