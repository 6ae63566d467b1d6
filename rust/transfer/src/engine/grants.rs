//! The granting side: grants of local clients, who comes to fill them, and how they end.

use crate::messages::{GrantMode, GrantedSlot, LocalEvent, NOTE_LIMIT, PeerMessage, Refusal};
use crate::pool::{Granting, Holder, Wish};
use crate::types::{BlockKey, ClientId, Kind, Layout, Nanos, NodeId, Tag};

use super::Engine;
use super::push::Opened;

/// Who opened a grant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Opener {
    Local(ClientId),
    Peer(NodeId),
}

/// An open at the granting daemon: first it waits for the grant, then it fills it. One per tag.
#[derive(Debug)]
pub(super) struct Visit {
    /// `None`: has delivered all and gone.
    pub opener: Option<Opener>,
    /// Layout and namespace of the opener's blocks.
    of: (Layout, u64),
    /// `Some` while it waits for the grant.
    deadline: Option<Nanos>,
    note: Option<Vec<u8>>,
    complete: bool,
}

impl Engine {
    pub(super) fn grant(&mut self, store: usize, holder: Holder, wish: Wish, mode: GrantMode) -> bool {
        match self.stores.grant(store, holder, wish, mode) {
            Granting::Held(slots) => {
                self.granted(holder, slots);
                return true;
            }
            Granting::Waiting => {}
            Granting::Refused(refusal) => {
                if let Some(client) = holder.client {
                    self.refuse(client, holder.tag, refusal);
                }
            }
        }
        false
    }

    pub(super) fn granted(&mut self, holder: Holder, slots: Vec<GrantedSlot>) {
        if let Some(client) = holder.client {
            self.tell(client, LocalEvent::Granted { tag: holder.tag, slots });
            self.welcome(holder.tag);
        }
    }

    pub(super) fn lookup(&mut self, store: usize, client: ClientId, tag: Tag, keys: &[BlockKey]) {
        if self.stores.has_ended(tag) {
            return self.refuse(client, tag, Refusal::Ended);
        }
        let slots = self.stores.lookup(store, Holder { client: Some(client), tag }, keys);
        let behind = self.leading_behind(store, keys.get(slots.len()..).unwrap_or_default());
        self.tell(client, LocalEvent::Located { tag, slots, behind });
    }

    pub(super) fn local_commit(&mut self, client: ClientId, tag: Tag, indices: &[u32]) {
        let holder = Holder { client: Some(client), tag };
        let open = self.opens.get(&tag).filter(|open| open.client == client);
        match open.map(|open| &open.state) {
            Some(Opened::Local) => {
                self.commit_in_place(client, tag, indices);
                return;
            }
            // The refusal is on its way.
            Some(Opened::Over) => return,
            _ => {}
        }
        let Some(store) = self.home(client) else { return };
        let failed = indices.iter().find_map(|&index| self.commit_written(store, holder, index).err());
        if let Some(refusal) = failed {
            self.refuse(client, tag, refusal);
        }
        self.check_complete(tag);
    }

    /// Commits what a client says that it has written into a slot of its own grant.
    fn commit_written(&mut self, at: usize, holder: Holder, index: u32) -> Result<(), Refusal> {
        let slot = self.stores.get(at).and_then(|store| store.pool.granted_at(holder, index));
        match slot.filter(|slot| !slot.committed) {
            // A peer that was asked to fill it has not said that it never will.
            Some(slot) if self.may_be_written_late(at, slot.slot) => Err(Refusal::Corrupt),
            _ => self.stores.commit(at, holder, index, None),
        }
    }

    /// A client that opened a grant of this very arena has written these blocks. False if that was refused.
    pub(super) fn commit_in_place(&mut self, writer: ClientId, tag: Tag, indices: &[u32]) -> bool {
        let Some((at, client)) = self.stores.granted_to(tag) else {
            self.refuse(writer, tag, Refusal::Ended);
            return false;
        };
        let holder = Holder { client: Some(client), tag };
        let by = Holder { client: Some(writer), tag };
        let mut arrived = Vec::new();
        let mut failed = None;
        for &index in indices {
            let slot = self.stores.get(at).and_then(|store| store.pool.granted_at(holder, index));
            let wanted = slot.is_some_and(|slot| !slot.committed);
            match self.stores.commit(at, holder, index, Some(by)) {
                Ok(()) if wanted => arrived.push(index),
                Ok(()) => {}
                Err(refusal) => failed = Some(refusal),
            }
        }
        self.stats.blocks_arena += arrived.len() as u64;
        if !arrived.is_empty() && client != writer {
            self.tell(client, LocalEvent::Arrived { tag, indices: arrived });
        }
        if let Some(refusal) = failed {
            self.refuse(writer, tag, refusal);
        }
        self.check_complete(tag);
        failed.is_none()
    }

    pub(super) fn corrupt(&mut self, client: ClientId, tag: Tag, index: u32) {
        let Some(store) = self.home(client).and_then(|at| self.stores.get_mut(at)) else { return };
        let holder = Holder { client: Some(client), tag };
        let slot = match store.pool.granted_at(holder, index) {
            Some(slot) => slot.committed.then_some(slot.slot),
            None => store.pool.looked_at(holder, index),
        };
        match slot {
            Some(slot) => {
                self.stats.corrupt_arena += 1;
                store.pool.unpublish(slot);
            }
            None => self.refuse(client, tag, Refusal::Protocol),
        }
    }

    /// Ends a tag in every way the client has used it.
    pub(super) fn end(&mut self, client: ClientId, tag: Tag) {
        let holder = Holder { client: Some(client), tag };
        let led = self.drop_wants(holder);
        let opened = self.opens.get(&tag).is_some_and(|open| open.client == client);
        if opened {
            self.close_open(tag);
            self.ended_opens.insert(tag);
        }
        let anothers = self.stores.granted_to(tag).is_some_and(|(_, owner)| owner != client);
        let Some(store) = self.home(client).and_then(|at| self.stores.get_mut(at)) else { return };
        let granted = store.pool.release(holder);
        self.lead_all_on(led);
        // One who never was granted it ends it too, so that a grant that comes after its abort is refused.
        if granted || !(opened || anothers) {
            if let Some(store) = self.home(client).and_then(|at| self.stores.get_mut(at)) {
                store.pool.end(tag);
            }
            self.dismiss(tag);
        }
    }

    // -- those who come to fill a grant ------------------------------------------------------------------------------

    /// Somebody asks for the grant of a tag and waits until it exists.
    /// of: the layout and the namespace of what it would fill it with.
    pub(super) fn visit(&mut self, tag: Tag, opener: Opener, of: (Layout, u64), deadline: Nanos) {
        let refusal = if self.stores.has_ended(tag) {
            Some(Refusal::Ended)
        } else if self.visits.contains_key(&tag) {
            Some(Refusal::Protocol)
        } else if self.visits.len() >= self.settings.opens || self.turns_away_visit(tag) {
            Some(Refusal::Full)
        } else {
            None
        };
        match refusal {
            Some(refusal) => self.turn_away(tag, opener, refusal),
            None => {
                let deadline = Some(deadline);
                let visit = Visit { opener: Some(opener), of, deadline, note: None, complete: false };
                self.visits.insert(tag, visit);
                self.welcome(tag);
            }
        }
    }

    /// If a grant and its visitor are both here, lets the visitor in.
    fn welcome(&mut self, tag: Tag) {
        let Some((at, client)) = self.stores.granted_to(tag) else { return };
        let Some(store) = self.stores.get_mut(at) else { return };
        let holder = Holder { client: Some(client), tag };
        let Some(slots) = store.pool.granted(holder) else { return };
        let Some(visit) = self.visits.get_mut(&tag).filter(|visit| visit.deadline.is_some()) else { return };
        let Some(opener) = visit.opener.clone() else { return };
        // Blocks of another model may have the same size; nobody who makes such may fill this grant.
        let namespace = self.clients.get(&client).map(|client| client.namespace);
        if (visit.of.0, Some(visit.of.1)) != (store.layout(), namespace) {
            self.visits.remove(&tag);
            return self.turn_away(tag, opener, Refusal::Protocol);
        }
        visit.deadline = None;
        match opener {
            Opener::Peer(peer) => {
                let region = store.region;
                self.say(&peer, PeerMessage::Opened { tag, region, slots });
            }
            Opener::Local(writer) => {
                store.pool.add_writer(holder, Holder { client: Some(writer), tag });
                if let Some(open) = self.opens.get_mut(&tag) {
                    open.state = Opened::Local;
                }
                let committed = slots.iter().map(|slot| slot.committed).collect();
                self.tell(writer, LocalEvent::Opened { tag, committed, slots });
            }
        }
    }

    fn turn_away(&mut self, tag: Tag, opener: Opener, refusal: Refusal) {
        match opener {
            Opener::Peer(peer) => self.say(&peer, PeerMessage::OpenRefused { tag, refusal }),
            Opener::Local(_) => self.fail_open(tag, refusal, false),
        }
    }

    /// The grant is over: whoever fills it, or waits to, is told.
    fn dismiss(&mut self, tag: Tag) {
        let Some(visit) = self.visits.remove(&tag) else { return };
        match visit.opener {
            Some(Opener::Peer(peer)) if visit.deadline.is_some() => {
                self.say(&peer, PeerMessage::OpenRefused { tag, refusal: Refusal::Ended });
            }
            Some(Opener::Peer(peer)) => self.say(&peer, PeerMessage::End { tag }),
            Some(Opener::Local(_)) if !visit.complete => self.fail_open(tag, Refusal::Ended, false),
            Some(Opener::Local(_)) | None => {}
        }
    }

    /// The visitor is gone. If it has not delivered its note, the grant will not be completed by it: the holder learns.
    pub(super) fn visitor_gone(&mut self, tag: Tag, opener: &Opener, refusal: Refusal) {
        let Some(visit) = self.visits.get_mut(&tag).filter(|visit| visit.opener.as_ref() == Some(opener)) else {
            return;
        };
        if visit.note.is_some() || visit.complete {
            visit.opener = None;
            return;
        }
        let waited = visit.deadline.is_some();
        self.visits.remove(&tag);
        if let (false, Some((_, client))) = (waited, self.stores.granted_to(tag)) {
            self.refuse(client, tag, refusal);
        }
    }

    pub(super) fn visitors_lost(&mut self, peer: &NodeId) {
        let opener = Opener::Peer(peer.clone());
        let lost = self.visits.iter().filter(|(_, visit)| visit.opener.as_ref() == Some(&opener));
        for tag in lost.map(|(tag, _)| *tag).collect::<Vec<_>>() {
            self.visitor_gone(tag, &opener, Refusal::Unreachable);
        }
    }

    /// Peers whose wait for a grant is over. (A local client's wait ends with its own open.)
    pub(super) fn visits_late(&mut self) {
        let late = |visit: &Visit| visit.deadline.is_some_and(|deadline| deadline <= self.now);
        for tag in self.visits.iter().filter(|(_, visit)| late(visit)).map(|(tag, _)| *tag).collect::<Vec<_>>() {
            if let Some(opener) = self.visits.remove(&tag).and_then(|visit| visit.opener) {
                self.turn_away(tag, opener, Refusal::Deadline);
            }
        }
    }

    /// A peer says that these blocks have been copied here, by which transport.
    pub(super) fn peer_commit(
        &mut self,
        peer: &NodeId,
        tag: Tag,
        indices: &[u32],
        via: Option<Kind>,
        note: Option<Vec<u8>>,
    ) {
        let visiting = self.visits.get(&tag).is_some_and(|visit| {
            visit.opener.as_ref() == Some(&Opener::Peer(peer.clone())) && visit.deadline.is_none()
        });
        let Some((at, client)) = self.stores.granted_to(tag).filter(|_| visiting) else {
            let refusal = Some(Refusal::Ended);
            return self.say(peer, PeerMessage::Committed { tag, indices: indices.to_vec(), note: false, refusal });
        };
        let holder = Holder { client: Some(client), tag };
        let mut arrived = Vec::new();
        let mut failed = note.as_ref().filter(|note| note.len() > NOTE_LIMIT).map(|_| Refusal::Protocol);
        for &index in indices {
            let Some(store) = self.stores.get(at) else { break };
            let outcome = match store.pool.granted_at(holder, index) {
                None => Err(Refusal::Protocol),
                Some(slot) if slot.committed => Ok(()),
                // The transport said that it is done; the bitmap of strips says whether that is so.
                Some(slot) if !store.arena.arrived_all(slot.slot) => Err(Refusal::Corrupt),
                Some(_) => self.stores.commit(at, holder, index, None).inspect(|()| arrived.push(index)),
            };
            if let Err(refusal) = outcome {
                self.stats.corrupt_wire += u64::from(refusal == Refusal::Corrupt);
                failed = Some(refusal);
            }
        }
        if let (Some(via), Some(store)) = (via, self.stores.get(at)) {
            self.stats.received[via as usize].add(arrived.len() as u64, store.layout().block_bytes() as u64);
        }
        if !arrived.is_empty() {
            self.tell(client, LocalEvent::Arrived { tag, indices: arrived });
        }
        let noted = note.is_some() && failed.is_none();
        if noted {
            self.take_note(tag, note);
        }
        let answer = PeerMessage::Committed { tag, indices: indices.to_vec(), note: noted, refusal: failed };
        self.say(peer, answer);
        self.check_complete(tag);
    }

    /// Keeps the pusher's note until the grant is complete.
    pub(super) fn take_note(&mut self, tag: Tag, note: Option<Vec<u8>>) {
        if let Some(visit) = self.visits.get_mut(&tag).filter(|visit| !visit.complete) {
            visit.note = note;
        }
    }

    /// All blocks readable and the note here: the holder is told, once.
    pub(super) fn check_complete(&mut self, tag: Tag) {
        let Some(visit) = self.visits.get_mut(&tag).filter(|visit| !visit.complete && visit.note.is_some()) else {
            return;
        };
        let Some((at, client)) = self.stores.granted_to(tag) else { return };
        let slots = self.stores.get(at).and_then(|store| store.pool.granted(Holder { client: Some(client), tag }));
        if slots.is_some_and(|slots| slots.iter().all(|slot| slot.committed))
            && let Some(note) = visit.note.take()
        {
            visit.complete = true;
            self.tell(client, LocalEvent::Complete { tag, note });
        }
    }
}
