//! The holder's side of a peer's fetch: blocks of this pool are pushed into the peer's slots, from the arena, or from the
//! medium behind it by way of the arena.

use crate::messages::{PeerMessage, Refusal, Ticket};
use crate::pool::Pool;
use crate::types::{BlockKey, Kind, Layout, Medium, NodeId, Owner, RegionId, SlotRef};

use super::Engine;
use super::copies::{Job, Why};
use super::fetch::{Want, Who};

/// A fetch that a peer has asked for.
#[derive(Debug)]
pub(super) struct Serving {
    /// Blocks that are not copied, or still have to come into the arena.
    pub left: usize,
    pub cancelled: bool,
    /// Serial of the link it came on: an earlier life of the peer may have used the same ticket.
    pub link: u64,
}

impl Engine {
    /// A peer wants blocks written into its slots.
    pub(super) fn serve(
        &mut self,
        peer: &NodeId,
        ticket: Ticket,
        region: RegionId,
        layout: Layout,
        blocks: Vec<(BlockKey, SlotRef)>,
    ) {
        let key = (peer.clone(), ticket);
        let busy = self.serving.len() >= self.settings.fetches || self.serving.contains_key(&key);
        let behind: Vec<bool> = blocks.iter().map(|(block, _)| self.tier_record(block, layout).is_some()).collect();
        // After a start nobody may have attached yet whose blocks these are.
        let at = self.stores.of(layout).or_else(|| {
            let any = behind.iter().any(|behind| *behind);
            if any { self.store_for(layout).ok() } else { None }
        });
        // Of all its fetches, what waits for a read included: each costs memory until it ends.
        let pending = self.pending_for(peer);
        let Some(link) = self.links.get_mut(peer) else { return };
        let serial = link.serial;
        let mut left = 0;
        let mut refused = Vec::new();
        let mut wanted = Vec::new();
        for ((place, (block, destination)), behind) in (0..).zip(blocks).zip(behind) {
            let destination = (region, destination);
            if busy || pending + left >= self.settings.copies_waiting {
                refused.push((place, Refusal::Full));
                continue;
            }
            let found = at.and_then(|at| Some((at, self.stores.get_mut(at)?)));
            let source = found.and_then(|(at, store)| Some((at, store.pool.find(&block)?, &mut store.pool)));
            let begun = |(at, source, pool): (_, _, &mut Pool<_>)| {
                pool.begin_copy(source).then(|| (at, source, pool.owner_of(source)))
            };
            match source.and_then(begun) {
                Some((store, source, owner)) => {
                    left += 1;
                    let why = Why::Serve { peer: peer.clone(), ticket, place, medium: Medium::Dram, owner };
                    let strips = 0..layout.strips;
                    link.waiting.push_back(Job { store, source, destination, strips, why, attempt: 0, link: serial });
                }
                None if behind => {
                    left += 1;
                    wanted.push((block, place, destination));
                }
                None => refused.push((place, Refusal::Missing)),
            }
        }
        if left > 0 {
            self.serving.insert(key, Serving { left, cancelled: false, link: serial });
        }
        for (place, refusal) in refused {
            self.say(peer, PeerMessage::Fetched { ticket, place, copied: Err(refusal) });
        }
        for (block, place, destination) in wanted {
            let who = Who::Peer { peer: peer.clone(), ticket, place, link: serial, destination };
            let record = self.tier_record(&block, layout);
            match at.zip(record) {
                Some((at, record)) => self.want(at, record.place, Want::new(who, &[])),
                None => self.served(peer, ticket, place, serial, Err(Refusal::Missing)),
            }
        }
    }

    /// How many blocks are still to go to a peer, of all that it has asked for.
    fn pending_for(&self, peer: &NodeId) -> usize {
        let fetches = self.serving.range((peer.clone(), Ticket::MIN)..=(peer.clone(), Ticket::MAX));
        fetches.map(|(_, serving)| serving.left).sum()
    }

    /// A block that a peer wants has come into the arena.
    pub(super) fn serve_found(
        &mut self,
        at: usize,
        source: Option<SlotRef>,
        medium: Medium,
        (peer, ticket, place, serial): (NodeId, Ticket, u32, u64),
        destination: (RegionId, SlotRef),
    ) {
        let strips = self.stores.get(at).map_or(0, |store| store.layout().strips);
        let pool = self.stores.get_mut(at).map(|store| &mut store.pool);
        let link = self.links.get_mut(&peer).filter(|link| link.serial == serial);
        let source = source
            .zip(pool)
            .and_then(|(source, pool)| pool.begin_copy(source).then(|| (source, pool.owner_of(source))));
        match link.zip(source) {
            Some((link, (source, owner))) => {
                let why = Why::Serve { peer, ticket, place, medium, owner };
                let job = Job { store: at, source, destination, strips: 0..strips, why, attempt: 0, link: serial };
                link.waiting.push_back(job);
            }
            None => self.served(&peer, ticket, place, serial, Err(Refusal::Missing)),
        }
    }

    /// A block of a served fetch is copied, or will not be.
    pub(super) fn served(
        &mut self,
        peer: &NodeId,
        ticket: Ticket,
        place: u32,
        link: u64,
        copied: Result<(Kind, Medium, Owner), Refusal>,
    ) {
        let key = (peer.clone(), ticket);
        let Some(serving) = self.serving.get_mut(&key).filter(|serving| serving.link == link) else { return };
        serving.left -= 1;
        let (over, cancelled) = (serving.left == 0, serving.cancelled);
        if over {
            self.serving.remove(&key);
        }
        if !cancelled {
            self.say(peer, PeerMessage::Fetched { ticket, place, copied });
        } else if over {
            self.say(peer, PeerMessage::FetchEnded { ticket });
        }
    }

    /// The asker has lost interest: what has not begun never will; the rest is waited for.
    pub(super) fn peer_cancel(&mut self, peer: &NodeId, ticket: Ticket) {
        let key = (peer.clone(), ticket);
        let dropped = self.drop_waiting(peer, |job| job.serves(&key)) + self.drop_peer_wants(peer, Some(ticket));
        let over = match self.serving.get_mut(&key) {
            Some(serving) => {
                serving.left -= dropped;
                serving.cancelled = true;
                serving.left == 0
            }
            None => true,
        };
        if over {
            self.serving.remove(&key);
            self.say(peer, PeerMessage::FetchEnded { ticket });
        }
    }

    /// The session with a peer is over: nothing needs to go to it.
    pub(super) fn servings_lost(&mut self, peer: &NodeId) {
        self.serving.retain(|(asker, _), _| asker != peer);
        self.drop_peer_wants(peer, None);
    }

    /// Asserts that what is left of each served fetch is being done.
    pub(super) fn check_servings<'a>(&'a self, jobs: impl Iterator<Item = &'a Job> + Clone) {
        for peer in self.links.keys() {
            assert!(self.pending_for(peer) <= self.settings.copies_waiting, "too much is to go to {peer}");
        }
        for (key, serving) in &self.serving {
            let copies = jobs.clone().filter(|job| job.serves(key) && job.link == serving.link).count();
            let wants = self.flights.values().flat_map(|flight| flight.wants());
            let coming = wants.filter(
                |want| matches!(&want.who, Who::Peer { peer, ticket, .. } if *peer == key.0 && *ticket == key.1),
            );
            let (coming, left) = (coming.count(), serving.left);
            assert!(
                left == copies + coming && left > 0,
                "{copies} copies and {coming} reads serve {key:?}, not {left}"
            );
        }
    }
}
