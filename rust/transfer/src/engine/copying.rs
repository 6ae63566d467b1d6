//! Copies of objects that another node, or a client, wants to be here, and objects that leave a node that drains.
//!
//! ```text
//! Copy ---> keys of its other blocks not known? Parts, from who has it ---> blocks behind the head ---> the head ---> Copied
//! ```
//!
//! A copy is a put whose blocks are fetched instead of written: what has come is held until the head is here, and if one
//! block is not to be had, nothing stays.

use std::collections::BTreeMap;

use crate::messages::{GrantMode, PeerMessage, Refusal, Ticket};
use crate::objects::classes::Class;
use crate::objects::hints::Head;
use crate::objects::messages::{Wanted, chained};
use crate::objects::talk::{Talk, ToCopy};
use crate::pool::{Granting, Holder, Wish};
use crate::types::{BlockKey, ClientId, Nanos, NodeAddress, NodeId, Owner};

use super::objects::{Block, NAMESPACE, holder};
use super::{Engine, SECOND};

/// The client of the engine's own puts; clients are numbered from 1.
pub(super) const ENGINE: ClientId = 0;

/// Blocks of copies under way: enough to keep a peer busy with large ones, and each holds a slot.
const BLOCKS: usize = 64;
/// Copies that are begun, of all that wait.
const BEGUN: usize = 64;
/// Copies that wait; what is beyond is not taken.
const WAITING: usize = 1 << 16;
/// Who wait for one copy; whoever comes later has another one made, which finds it here.
const ASKERS: usize = 64;
/// How long somebody may take to say which blocks an object has, though its session stands: it answers in microseconds.
const PARTS_WITHIN: Nanos = 3 * SECOND;
/// Objects that leave at a time.
const LEAVING: usize = 64;

/// Who is told how a copy ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Asker {
    Peer(NodeId, Ticket),
    Quest(u64),
    Nobody,
    /// A block that a client wants brought: which bring, and its place there.
    Bring(u64, (usize, Wanted)),
}

/// An object on its way here.
#[derive(Debug)]
struct Job {
    /// With its place in each one's list.
    askers: Vec<(Asker, u32)>,
    head: Head,
    from: Vec<NodeId>,
    /// Who is asked for the keys of its other blocks, and until when.
    asked: Option<(NodeId, Nanos)>,
    parts: Option<Vec<BlockKey>>,
    /// Blocks that are begun: those behind the head first, the head last.
    begun: usize,
    under_way: usize,
    /// The head has come.
    headed: bool,
    failed: bool,
    /// There was no room.
    full: bool,
}

impl Job {
    /// Which block is begun next; none while the head waits for the others, or all have.
    fn next(&self) -> Option<u32> {
        let parts = self.parts.as_ref()?.len();
        if self.failed || self.begun > parts || (self.begun == parts && self.under_way > 0) {
            return None;
        }
        Some(if self.begun < parts { self.begun as u32 + 1 } else { 0 })
    }

    fn is_over(&self) -> bool {
        let all = self.parts.as_ref().is_some_and(|parts| self.begun > parts.len());
        self.under_way == 0 && (self.failed || all)
    }
}

/// True if an object may have these blocks behind its head. Whoever says so may be wrong, and a copy with a block too few
/// would be a value that is not there as a whole.
fn are_of(head: &Head, parts: &[BlockKey]) -> bool {
    let second = parts.first().unwrap_or(&head.value);
    chained(&head.value, second) == (parts.len() as u32 + 1, true)
}

/// The engine's books about copies.
#[derive(Debug, Default)]
pub(super) struct Copying {
    /// By the number of their put, in the order in which they were asked for.
    jobs: BTreeMap<u64, Job>,
    /// Which job has a name's object.
    by_name: BTreeMap<BlockKey, u64>,
    /// Blocks under way, of all of them.
    under_way: usize,
    /// Objects that are to leave, the most used last; `Some` while some do.
    leaving: Option<Vec<BlockKey>>,
    /// How many have left, since the last time that this node began to drain.
    pub left: u64,
    tell: Nanos,
}

impl Copying {
    pub fn is_idle(&self) -> bool {
        self.jobs.is_empty() && self.leaving.is_none()
    }

    /// Objects that are still to leave.
    pub fn to_leave(&self) -> usize {
        self.leaving.as_ref().map_or(0, Vec::len)
    }

    pub fn unfinished(&self) -> impl Iterator<Item = String> {
        self.jobs.values().map(|job| format!("copy of an object {job:?}"))
    }
}

impl Engine {
    /// A member wants copies to be here.
    pub(super) fn copy_for_peer(&mut self, node: &NodeId, ticket: Ticket, objects: Vec<ToCopy>) {
        self.take_copies(Asker::Peer(node.clone(), ticket), objects);
    }

    /// Copies these objects here.
    pub(super) fn take_copies(&mut self, asker: Asker, objects: Vec<ToCopy>) {
        for (place, ToCopy { head, parts, mut from }) in (0..).zip(objects) {
            if from.contains(&self.node.node) && self.own_head(&head.key).is_none() {
                self.doubt(head, self.node.node.clone());
            }
            from.retain(|node| *node != self.node.node);
            from.reverse();
            // Most are one block.
            let parts = if chained(&head.value, &head.value).0 == 1 { Some(Vec::new()) } else { parts };
            let parts = parts.filter(|parts| are_of(&head, parts));
            let failed =
                self.is_draining() || self.cluster.copying.jobs.len() >= WAITING || Class::new(head.class).is_none();
            if failed {
                // Nobody is asked.
                from.clear();
            }
            let asker = (asker.clone(), place);
            let known = self.cluster.copying.by_name.get(&head.key);
            let known = known.and_then(|number| self.cluster.copying.jobs.get_mut(number));
            if let Some(job) = known.filter(|job| job.head == head && job.askers.len() < ASKERS) {
                job.askers.push(asker);
                continue;
            }
            let job = Job {
                askers: vec![asker],
                head,
                from,
                asked: None,
                parts,
                begun: 0,
                under_way: 0,
                headed: false,
                failed,
                full: false,
            };
            let number = self.number();
            self.cluster.copying.by_name.insert(head.key, number);
            self.cluster.copying.jobs.insert(number, job);
        }
    }

    /// Somebody else waits for a copy that is on its way here already. False: there is none of that name.
    pub(super) fn join_copy(&mut self, key: &BlockKey, asker: Asker) -> bool {
        let Some(number) = self.cluster.copying.by_name.get(key) else { return false };
        let job = self.cluster.copying.jobs.get_mut(number).filter(|job| job.askers.len() < ASKERS);
        job.map(|job| job.askers.push((asker, 0))).is_some()
    }

    /// After every input: begins blocks, as far as others have ended, and ends what is complete.
    pub(super) fn copying_on(&mut self) {
        loop {
            let first = |(number, _): (&u64, &Job)| *number;
            let begun: Vec<u64> = self.cluster.copying.jobs.iter().take(BEGUN).map(first).collect();
            let mut ended = false;
            for number in begun {
                ended |= self.copy_on(number);
            }
            if !ended {
                break;
            }
        }
        self.leave_some();
    }

    /// True if it has ended.
    fn copy_on(&mut self, number: u64) -> bool {
        let mut fresh = true;
        loop {
            let Some(job) = self.cluster.copying.jobs.get(&number) else { return false };
            if job.is_over() {
                self.end_copy(number);
                return true;
            }
            if job.begun == 0 && std::mem::take(&mut fresh) && self.own_head(&job.head.key).is_some() {
                // That one, or another value of the name.
                self.end_copy(number);
                return true;
            }
            if job.parts.is_none() {
                self.ask_parts(number);
                let failed = self.cluster.copying.jobs.get(&number).is_some_and(|job| job.failed);
                if failed {
                    continue;
                }
                return false;
            }
            let Some(index) = job.next().filter(|_| self.cluster.copying.under_way < BLOCKS) else { return false };
            self.begin_block(number, index);
        }
    }

    fn begin_block(&mut self, number: u64, index: u32) {
        let Some(job) = self.cluster.copying.jobs.get(&number) else { return };
        let Head { key: head, value, class } = job.head;
        let part = |at: u32| job.parts.as_ref().and_then(|parts| parts.get(at as usize - 1)).copied();
        let (key, parent) = match index {
            0 => (Some(head), Some(value)),
            1 => (part(1), Some(head)),
            _ => (part(index), part(index - 1)),
        };
        let from: Vec<NodeAddress> =
            job.from.iter().rev().filter_map(|node| self.cluster.address(node)).cloned().collect();
        if let Some(job) = self.cluster.copying.jobs.get_mut(&number) {
            job.begun += 1;
        }
        let store = Class::new(class).and_then(|class| self.store_for(class.layout()).ok());
        let held = key.zip(parent).zip(store).and_then(|((key, parent), store)| {
            let owner = Owner { namespace: NAMESPACE, tenant: 0 };
            let wish = Wish { keys: vec![key], private: false, parent, position: index, owner };
            let granting = self.stores.grant(store, holder(ENGINE, number, index), wish, GrantMode::Now);
            matches!(granting, Granting::Held(_)).then_some((key, store))
        });
        let Some((key, store)) = held else {
            if let Some(job) = self.cluster.copying.jobs.get_mut(&number) {
                (job.failed, job.full) = (true, true);
            }
            return;
        };
        if let Some(job) = self.cluster.copying.jobs.get_mut(&number) {
            job.under_way += 1;
        }
        self.cluster.copying.under_way += 1;
        self.objects.begin_copied(number, index, Block { key, store, committed: false });
        self.begin_fetch(store, holder(ENGINE, number, index), &[0], &from);
    }

    /// A block of a copy has come, or will not.
    pub(super) fn copy_landed(&mut self, holder: Holder, good: bool) {
        let (number, index) = (holder.tag.request, holder.tag.attempt);
        let Some(job) = self.cluster.copying.jobs.get_mut(&number) else { return };
        job.under_way -= 1;
        job.failed |= !good;
        self.cluster.copying.under_way -= 1;
        job.headed |= good && index == 0;
        if good && index > 0 {
            self.part_committed(ENGINE, number, index);
        }
    }

    fn end_copy(&mut self, number: u64) {
        let Some(job) = self.cluster.copying.jobs.remove(&number) else { return };
        if self.cluster.copying.by_name.get(&job.head.key) == Some(&number) {
            self.cluster.copying.by_name.remove(&job.head.key);
        }
        // What was removed meanwhile is gone with this.
        self.note_objects();
        let here = self.own_head(&job.head.key) == Some(job.head);
        let whole = here && !(job.failed || self.objects.is_broken(number));
        if whole && job.headed {
            self.keep_put(ENGINE, number, job.head.key);
        } else {
            if here && job.headed {
                self.forget_block(&job.head.key);
            }
            self.abandon(ENGINE, number);
        }
        if job.failed && !job.full {
            // One has not given it, and each may be the one.
            job.from.into_iter().for_each(|holder| self.doubt(job.head, holder));
        }
        // Who is told may ask its home at once.
        self.tell_homes();
        let refusal = if job.full { Refusal::Full } else { Refusal::Missing };
        for (asker, place) in job.askers {
            self.tell_asker(&asker, vec![(place, if whole { Ok(()) } else { Err(refusal) })]);
        }
    }

    fn tell_asker(&mut self, asker: &Asker, ended: Vec<(u32, Result<(), Refusal>)>) {
        let bits = |ended: &[(u32, Result<(), Refusal>)]| ended.iter().map(|(at, end)| (*at, end.is_ok())).collect();
        match asker {
            Asker::Peer(node, ticket) => {
                self.say(node, PeerMessage::Objects(Talk::Copied { ticket: *ticket, ended: bits(&ended) }));
            }
            Asker::Quest(number) => {
                let me = self.node.node.clone();
                let ended: Vec<(u32, bool)> = bits(&ended);
                self.quest_copied(*number, &me, &ended);
            }
            Asker::Nobody => {}
            Asker::Bring(bring, wanted) => {
                for (_, end) in ended {
                    self.bring_came(*bring, wanted, end);
                }
            }
        }
    }

    /// Each second: who waits for copies is told that they go on. Who does not say which blocks there are is asked no more.
    pub(super) fn copying_tick(&mut self) {
        if self.now < self.cluster.copying.tell {
            return;
        }
        self.cluster.copying.tell = self.now + SECOND;
        let now = self.now;
        for job in self.cluster.copying.jobs.values_mut() {
            if job.asked.take_if(|(_, until)| *until <= now).is_some() {
                job.from.pop();
            }
        }
        let mut askers: Vec<Asker> = Vec::new();
        for (asker, _) in self.cluster.copying.jobs.values().flat_map(|job| &job.askers) {
            if askers.last() != Some(asker) {
                askers.push(asker.clone());
            }
        }
        askers.iter().for_each(|asker| self.tell_asker(asker, Vec::new()));
    }

    // -- keys of other blocks ----------------------------------------------------------------------------------------

    fn ask_parts(&mut self, number: u64) {
        let cluster = &mut self.cluster;
        let Some(job) = cluster.copying.jobs.get(&number).filter(|job| job.asked.is_none()) else { return };
        // Whom the home names may be gone by now, or not be known here yet: nobody would ever hear of such a one.
        let joined = job.from.iter().rposition(|node| cluster.address(node).is_some());
        let Some(job) = cluster.copying.jobs.get_mut(&number) else { return };
        job.from.truncate(joined.map_or(0, |at| at + 1));
        let head = job.head;
        match job.from.last().cloned() {
            Some(node) => {
                job.asked = Some((node.clone(), self.now + PARTS_WITHIN));
                self.say(&node, PeerMessage::Objects(Talk::Parts { ticket: number, head }));
            }
            None => job.failed = true,
        }
    }

    pub(super) fn copy_parts(&mut self, number: Ticket, node: &NodeId, parts: Option<Vec<BlockKey>>) {
        let asked = |job: &&mut Job| job.asked.as_ref().is_some_and(|(asked, _)| asked == node);
        let Some(job) = self.cluster.copying.jobs.get_mut(&number).filter(asked) else { return };
        job.asked = None;
        let parts = parts.filter(|parts| are_of(&job.head, parts));
        if parts.is_none() {
            // The next one may have it.
            job.from.pop();
        }
        let (head, lacks) = (job.head, parts.is_none());
        job.parts = parts;
        if lacks {
            self.doubt(head, node.clone());
        }
    }

    /// Nobody there answers any more.
    pub(super) fn copies_lost(&mut self, node: &NodeId) {
        for job in self.cluster.copying.jobs.values_mut() {
            job.from.retain(|other| other != node);
            job.asked.take_if(|(asked, _)| asked == node);
        }
    }

    // -- leaving -----------------------------------------------------------------------------------------------------

    /// This node drains: what only it has goes to others after the next input, the most used first.
    pub(super) fn begin_to_leave(&mut self) {
        if self.cluster.others().is_empty() {
            return;
        }
        // Of each size the most used first; where sizes differ, in proportion: no order goes across them.
        let mut ranked: Vec<(f64, BlockKey)> = Vec::new();
        for store in self.stores.iter().filter(|store| store.objects) {
            let coldest = store.pool.coldest(usize::MAX);
            let count = coldest.len() as f64;
            let heads = coldest.into_iter().enumerate().filter_map(|(at, slot)| {
                let place = store.pool.published_within(slot, 1).next()?.place;
                (place.position == 0).then_some((at as f64 / count, place.key))
            });
            ranked.extend(heads);
        }
        // Those that are in use, or have blocks behind them, are no candidates: they are as good as used just now.
        let known: std::collections::BTreeSet<BlockKey> = ranked.iter().map(|(_, key)| *key).collect();
        let others = self.own_heads().into_iter().filter(|head| !known.contains(&head.key));
        ranked.extend(others.map(|head| (1.0, head.key)));
        ranked.sort_by(|one, other| one.0.total_cmp(&other.0).then(one.1.cmp(&other.1)));
        self.cluster.copying.left = 0;
        self.cluster.copying.leaving = Some(ranked.into_iter().map(|(_, key)| key).collect());
    }

    /// It drains no more.
    pub(super) fn stop_leaving(&mut self) {
        self.cluster.copying.leaving = None;
    }

    fn leave_some(&mut self) {
        if self.cluster.quests_leave() || self.quests_are_full() {
            return;
        }
        let Some(rest) = &mut self.cluster.copying.leaving else { return };
        let keys = rest.split_off(rest.len().saturating_sub(LEAVING));
        if keys.is_empty() {
            self.cluster.copying.leaving = None;
        } else {
            self.objects_leave(keys);
        }
    }

    /// So many of the last ones are at another node now.
    pub(super) fn left_some(&mut self, moved: u64) {
        self.cluster.copying.left += moved;
    }

    /// Asserts the laws of this file.
    pub(super) fn check_copying(&self) {
        let copying = &self.cluster.copying;
        let under_way: usize = copying.jobs.values().map(|job| job.under_way).sum();
        assert!(copying.by_name.values().all(|number| copying.jobs.contains_key(number)), "a name without a copy");
        assert!(under_way == copying.under_way && under_way <= BLOCKS, "{under_way} blocks of copies under way");
    }
}
