//! The pushing side: opening a grant elsewhere and filling it.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::messages::{GrantedSlot, LocalEvent, NOTE_LIMIT, PeerMessage, Refusal};
use crate::mover::Failure;
use crate::pool::Holder;
use crate::types::{ClientId, Kind, Nanos, NodeAddress, NodeId, RegionId, Tag};

use super::Engine;
use super::copies::{Job, Why};
use super::grants::Opener;

/// How far an open has come.
#[derive(Debug)]
pub(super) enum Opened {
    /// For the grant, or for the session.
    Waiting,
    /// The grant lies in a peer's arena.
    Remote(Filling),
    /// The grant lies in this arena; the client writes it itself.
    Local,
    /// Refused, and the client was told; it owes the `End`.
    Over,
}

/// How far a push to a peer has come.
#[derive(Debug)]
pub(super) struct Filling {
    /// The peer's arena in which the slots are.
    region: RegionId,
    slots: Vec<GrantedSlot>,
    /// In each block.
    strips: u32,
    /// By index: how many strips were pushed, and how many have been copied.
    pushed: Vec<u32>,
    copied: Vec<u32>,
    /// Copies not completed.
    copying: usize,
    /// Copied, to be named in the next `Commit`.
    done: BTreeMap<Kind, Vec<u32>>,
    /// To be sent with the last `Commit`.
    note: Option<Vec<u8>>,
    noted: bool,
    /// The note was acknowledged: the peer may end the grant now.
    finished: bool,
}

/// A grant that a local client wants to fill.
#[derive(Debug)]
pub(super) struct Open {
    pub client: ClientId,
    pub to: NodeAddress,
    pub deadline: Nanos,
    pub state: Opened,
    /// Tells this open's copies from those of an earlier one.
    serial: u64,
}

impl Open {
    /// True if its end at the peer is no news to the client.
    pub fn over(&self) -> bool {
        match &self.state {
            Opened::Over => true,
            Opened::Remote(filling) => filling.finished,
            Opened::Waiting | Opened::Local => false,
        }
    }

    pub fn check<'a>(&self, tag: Tag, jobs: impl Iterator<Item = &'a Job>) {
        let copying = jobs.filter(|job| job.pushes(tag, self.serial)).count();
        if let Opened::Remote(filling) = &self.state {
            assert_eq!(filling.copying, copying, "copies of the push {tag:?}");
            assert!(filling.done.is_empty(), "copied blocks of {tag:?} were not named in a commit");
            assert!(filling.note.is_none() || copying > 0, "the note of {tag:?} waits for nothing");
            let counts = filling.pushed.iter().zip(&filling.copied);
            assert!(counts.clone().all(|(pushed, copied)| copied <= pushed), "more of {tag:?} was copied than pushed");
        }
    }
}

impl Engine {
    pub(super) fn open(&mut self, client: ClientId, tag: Tag, to: NodeAddress, within_ms: u64) {
        let here = to.node == self.node.node;
        let refusal = if self.ended_opens.contains(&tag) {
            Some(Refusal::Ended)
        } else if self.opens.contains_key(&tag) {
            Some(Refusal::Protocol)
        } else if self.opens.len() >= self.settings.opens {
            Some(Refusal::Full)
        } else if here && to.incarnation != self.node.incarnation {
            Some(Refusal::Unreachable)
        } else {
            None
        };
        if let Some(refusal) = refusal {
            return self.refuse(client, tag, refusal);
        }
        let Some(layout) = self.home(client).and_then(|at| Some(self.stores.get(at)?.layout())) else { return };
        let Some(namespace) = self.clients.get(&client).map(|client| client.namespace) else { return };
        let (deadline, serial) = (self.deadline(within_ms), self.number());
        self.opens.insert(tag, Open { client, to: to.clone(), deadline, state: Opened::Waiting, serial });
        if here {
            self.visit(tag, Opener::Local(client), (layout, namespace), deadline);
        } else if !self.reach(&to, PeerMessage::Open { tag, layout, namespace, within_ms }) {
            self.fail_open(tag, Refusal::Unreachable, false);
        }
    }

    pub(super) fn peer_opened(&mut self, peer: &NodeId, tag: Tag, region: RegionId, slots: Vec<GrantedSlot>) {
        // An open that has ended meanwhile has told the peer so.
        let Some(open) = self.opens.get_mut(&tag).filter(|open| open.to.node == *peer) else { return };
        if !matches!(open.state, Opened::Waiting) {
            return;
        }
        let at = self.clients.get(&open.client).map(|client| client.store);
        let Some(strips) = at.and_then(|at| Some(self.stores.get(at)?.layout().strips)) else { return };
        let committed: Vec<bool> = slots.iter().map(|slot| slot.committed).collect();
        open.state = Opened::Remote(Filling {
            region,
            strips,
            pushed: vec![0; slots.len()],
            copied: vec![0; slots.len()],
            slots,
            copying: 0,
            done: BTreeMap::new(),
            note: None,
            noted: false,
            finished: false,
        });
        let client = open.client;
        self.tell(client, LocalEvent::Opened { tag, committed, slots: Vec::new() });
    }

    /// `local`: under which tag the blocks are held here, and the index of the first of them in the grant.
    pub(super) fn push(
        &mut self,
        client: ClientId,
        (local, first): (Tag, u32),
        tag: Tag,
        indices: &[u32],
        strips: Option<(u32, u32)>,
        note: Option<Vec<u8>>,
    ) {
        if note.as_ref().is_some_and(|note| note.len() > NOTE_LIMIT) {
            return self.refuse(client, tag, Refusal::Protocol);
        }
        let Some(open) = self.opens.get_mut(&tag).filter(|open| open.client == client) else {
            return self.refuse(client, tag, Refusal::Protocol);
        };
        match &mut open.state {
            // The refusal is on its way.
            Opened::Over => {}
            Opened::Waiting => self.refuse(client, tag, Refusal::Protocol),
            Opened::Local if strips.is_some() => self.refuse(client, tag, Refusal::Protocol),
            Opened::Local => {
                if self.commit_in_place(client, tag, indices) {
                    let noted = note.is_some();
                    if noted {
                        self.take_note(tag, note);
                    }
                    self.tell(client, LocalEvent::Pushed { tag, indices: indices.to_vec(), note: noted });
                    self.check_complete(tag);
                }
            }
            Opened::Remote(filling) => {
                let Some(at) = self.clients.get(&client).map(|client| client.store) else { return };
                let Some(pool) = self.stores.get_mut(at).map(|store| &mut store.pool) else { return };
                let holder = Holder { client: Some(client), tag: local };
                let written = strips.is_some();
                let (begin, end) = strips.unwrap_or((0, filling.strips));
                // All is looked at before anything is begun.
                let mut copies = Vec::new();
                let mut present = Vec::new();
                let mut wrong = filling.noted || begin >= end || end > filling.strips;
                for &index in indices {
                    let source = index.checked_sub(first).and_then(|index| pool.granted_at(holder, index));
                    let source = source.filter(|slot| slot.committed || written);
                    match (filling.slots.get(index as usize), source) {
                        (Some(slot), _) if slot.committed => present.push(index),
                        (Some(slot), Some(source)) => copies.push((index, source.slot, slot.slot)),
                        _ => wrong = true,
                    }
                    wrong |= filling.pushed.get(index as usize).is_none_or(|pushed| *pushed != begin);
                }
                if wrong {
                    return self.refuse(client, tag, Refusal::Protocol);
                }
                let Some(link) = self.links.get_mut(&open.to.node) else { return };
                if link.waiting.len() + copies.len() > self.settings.copies_waiting {
                    return self.refuse(client, tag, Refusal::Full);
                }
                if let Err(refusal) = copies.iter().try_for_each(|(_, source, _)| pool.may_copy(*source)) {
                    return self.refuse(client, tag, refusal);
                }
                for (index, source, destination) in copies {
                    let twice = std::mem::replace(&mut filling.pushed[index as usize], end) == end;
                    if !twice {
                        let begun = pool.begin_copy_written(source);
                        assert!(
                            begun,
                            "no more than one copy of each block begins here, and {source:?} could take one"
                        );
                        filling.copying += 1;
                        let why = Why::Push { tag, serial: open.serial, index };
                        let destination = (filling.region, destination);
                        let (strips, link_of) = (begin..end, link.serial);
                        let job = Job { store: at, source, destination, strips, why, attempt: 0, link: link_of };
                        link.waiting.push_back(job);
                    }
                }
                present.iter().for_each(|&index| filling.pushed[index as usize] = end);
                let whole = end == filling.strips;
                filling.noted = note.is_some();
                filling.note = note;
                if whole && !present.is_empty() {
                    self.tell(client, LocalEvent::Pushed { tag, indices: present, note: false });
                }
                self.send_commit(tag);
            }
        }
    }

    /// True if this open still wants its copies.
    pub(super) fn push_wants(&self, tag: Tag, serial: u64) -> bool {
        let open = self.opens.get(&tag).filter(|open| open.serial == serial);
        open.is_some_and(|open| matches!(open.state, Opened::Remote(_)))
    }

    /// A copy of a push has ended for good: what carried it, or why it failed.
    pub(super) fn push_copied(
        &mut self,
        tag: Tag,
        serial: u64,
        index: u32,
        strips: &Range<u32>,
        copied: Result<Kind, Refusal>,
    ) {
        let Some(open) = self.opens.get_mut(&tag).filter(|open| open.serial == serial) else { return };
        let Opened::Remote(filling) = &mut open.state else { return };
        filling.copying -= 1;
        match copied {
            Ok(via) => {
                let copied = &mut filling.copied[index as usize];
                *copied += strips.len() as u32;
                if *copied == filling.strips {
                    filling.done.entry(via).or_default().push(index);
                }
            }
            Err(refusal) => self.fail_open(tag, refusal, true),
        }
    }

    /// Names what has been copied, in one `Commit` for each transport that carried some; the last one has the note.
    pub(super) fn send_commit(&mut self, tag: Tag) {
        let Some(open) = self.opens.get_mut(&tag) else { return };
        let Opened::Remote(filling) = &mut open.state else { return };
        let note = if filling.copying == 0 { filling.note.take() } else { None };
        if filling.done.is_empty() && note.is_none() {
            return;
        }
        let mut done = std::mem::take(&mut filling.done);
        let last = done.pop_last();
        let peer = open.to.node.clone();
        for (via, indices) in done {
            self.say(&peer, PeerMessage::Commit { tag, indices, via: Some(via), note: None });
        }
        let (via, indices) = last.map_or((None, Vec::new()), |(via, indices)| (Some(via), indices));
        self.say(&peer, PeerMessage::Commit { tag, indices, via, note });
    }

    pub(super) fn peer_committed(
        &mut self,
        peer: &NodeId,
        tag: Tag,
        indices: Vec<u32>,
        note: bool,
        refusal: Option<Refusal>,
    ) {
        let Some(open) = self.opens.get_mut(&tag).filter(|open| open.to.node == *peer) else { return };
        let Opened::Remote(filling) = &mut open.state else { return };
        filling.finished |= note;
        let client = open.client;
        match refusal {
            None => self.tell(client, LocalEvent::Pushed { tag, indices, note }),
            Some(refusal) => self.fail_open(tag, refusal, true),
        }
    }

    /// An open has failed: its copies that have not begun never will, and the client is told.
    pub(super) fn fail_open(&mut self, tag: Tag, refusal: Refusal, tell_peer: bool) {
        let Some(open) = self.opens.get_mut(&tag) else { return };
        open.state = Opened::Over;
        let (client, to, serial) = (open.client, open.to.node.clone(), open.serial);
        self.drop_waiting(&to, |job| job.pushes(tag, serial));
        if to == self.node.node {
            // Its visit is over too; the client stays known as a writer until it ends the tag.
            self.visitor_gone(tag, &Opener::Local(client), refusal);
        } else if tell_peer {
            self.leave(&to, tag);
        }
        self.refuse(client, tag, refusal);
    }

    /// The client has ended its open.
    pub(super) fn close_open(&mut self, tag: Tag) {
        let Some(open) = self.opens.remove(&tag) else { return };
        self.drop_waiting(&open.to.node, |job| job.pushes(tag, open.serial));
        if open.to.node == self.node.node {
            // In whichever store the grant was.
            for store in self.stores.iter_mut() {
                store.pool.remove_writer(Holder { client: Some(open.client), tag });
            }
            self.visitor_gone(tag, &Opener::Local(open.client), Refusal::Ended);
        } else if !matches!(open.state, Opened::Over) {
            self.leave(&open.to.node, tag);
        }
    }

    /// Tells a peer that we are done with its grant; if it has not been asked yet, it never is.
    fn leave(&mut self, peer: &NodeId, tag: Tag) {
        if let Some(link) = self.links.get_mut(peer)
            && !link.up
        {
            link.outbox.retain(|message| !matches!(message, PeerMessage::Open { tag: asked, .. } if *asked == tag));
            return;
        }
        self.say(peer, PeerMessage::End { tag });
    }

    pub(super) fn opens_lost(&mut self, peer: &NodeId) {
        let lost = self.opens.iter().filter(|(_, open)| open.to.node == *peer && !open.over());
        for tag in lost.map(|(tag, _)| *tag).collect::<Vec<_>>() {
            self.fail_open(tag, Refusal::Unreachable, false);
        }
    }
}

/// What a failed copy means to whoever wanted it.
pub(super) fn refusal_of(failure: Failure) -> Refusal {
    match failure {
        Failure::Fenced => Refusal::Ended,
        Failure::Denied => Refusal::Protocol,
        Failure::Corrupt => Refusal::Corrupt,
        Failure::Unreachable => Refusal::Unreachable,
    }
}
