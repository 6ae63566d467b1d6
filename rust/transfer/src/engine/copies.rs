//! Copies on their way to peers: queued per peer, a bounded number under way, sent again where that can help.

use std::collections::BTreeSet;
use std::ops::Range;

use crate::messages::{Refusal, Ticket};
use crate::mover::Failure;
use crate::transport::{Copy, CopyId};
use crate::types::{Kind, Layout, Medium, NodeId, Owner, RegionId, SlotRef, Tag};

use super::push::refusal_of;
use super::{Engine, Output};

/// How a copy that was submitted has ended; its source is read no more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copied {
    /// Its number.
    pub id: CopyId,
    /// The transport that carried it: applied and verified there. Or why it failed.
    pub result: Result<Kind, Failure>,
}

/// What a copy is for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Why {
    Push {
        tag: Tag,
        serial: u64,
        index: u32,
    },
    /// `medium`: where this node had the block; `owner`: whose it is.
    Serve {
        peer: NodeId,
        ticket: Ticket,
        place: u32,
        medium: Medium,
        owner: Owner,
    },
}

/// A copy. As long as it exists, the pool counts it as a reader of `source`.
#[derive(Clone, Debug)]
pub(super) struct Job {
    /// Number of the source's store.
    pub store: usize,
    pub source: SlotRef,
    /// In that arena of the peer.
    pub destination: (RegionId, SlotRef),
    pub strips: Range<u32>,
    pub why: Why,
    /// How often it was sent before.
    pub attempt: u32,
    /// Serial of the link it belongs to.
    pub link: u64,
}

impl Job {
    pub fn pushes(&self, tag: Tag, serial: u64) -> bool {
        matches!(self.why, Why::Push { tag: its, serial: of, .. } if its == tag && of == serial)
    }

    pub fn serves(&self, key: &(NodeId, Ticket)) -> bool {
        matches!(&self.why, Why::Serve { peer, ticket, .. } if *peer == key.0 && *ticket == key.1)
    }
}

impl Engine {
    /// Submits as many waiting copies as each link may have under way.
    pub(super) fn pump(&mut self) {
        for link in self.links.values_mut().filter(|link| link.up) {
            let room = self.settings.copies_in_flight - link.in_flight;
            let mut copies = Vec::new();
            for job in link.waiting.drain(..link.waiting.len().min(room)) {
                let Some(store) = self.stores.get(job.store) else { continue };
                let id = self.next_number;
                self.next_number += 1;
                let (source, strips) = ((store.region, job.source), job.strips.clone());
                copies.push(Copy::strips(&store.arena, id, source, job.destination, strips));
                self.copies.insert(id, job);
            }
            link.in_flight += copies.len();
            if !copies.is_empty() {
                self.out.push(Output::Submit { peer: link.peer.clone(), copies });
            }
        }
    }

    pub(super) fn completed(&mut self, copied: Vec<Copied>) {
        let mut pushes = BTreeSet::new();
        for Copied { id, result } in copied {
            let Some(job) = self.copies.remove(&id) else { continue };
            if let Why::Push { tag, .. } = job.why {
                pushes.insert(tag);
            }
            self.job_completed(job, result);
        }
        for tag in pushes {
            self.send_commit(tag);
        }
    }

    fn job_completed(&mut self, mut job: Job, result: Result<Kind, Failure>) {
        let Some(store) = self.stores.get_mut(job.store) else { return };
        let mut result = result;
        let mut again = false;
        match result {
            Ok(via) => {
                let Layout { strips, strip_bytes } = store.layout();
                let bytes = job.strips.len() as u64 * u64::from(strip_bytes);
                let sent = &mut self.stats.sent[via as usize];
                // A block counts with its last strips, which are pushed last.
                sent.blocks += u64::from(job.strips.end == strips);
                sent.bytes += bytes;
            }
            // The source itself may be what is broken: then nobody shall find it any more.
            Err(Failure::Corrupt) if !store.arena.intact_strips(job.source, job.strips.clone()) => {
                self.stats.corrupt_arena += 1;
                store.pool.unpublish(job.source);
            }
            Err(Failure::Corrupt) => {
                self.stats.corrupt_wire += 1;
                again = true;
            }
            Err(Failure::Unreachable) => again = true,
            Err(Failure::Fenced | Failure::Denied) => {}
        }
        let wanted = self.wanted(&job);
        let mut links = self.links.values_mut();
        match links.find(|link| link.serial == job.link) {
            Some(link) => {
                link.in_flight -= 1;
                if again && wanted && job.attempt < self.settings.retries {
                    job.attempt += 1;
                    self.stats.retries += 1;
                    link.waiting.push_front(job);
                    return;
                }
            }
            // The session has ended, whatever the copy says.
            None => result = Err(Failure::Unreachable),
        }
        self.job_over(job, result.map_err(refusal_of));
    }

    /// True if somebody still waits for this copy.
    fn wanted(&self, job: &Job) -> bool {
        match &job.why {
            Why::Push { tag, serial, .. } => self.push_wants(*tag, *serial),
            Why::Serve { peer, ticket, .. } => {
                let serving = self.serving.get(&(peer.clone(), *ticket));
                serving.is_some_and(|serving| serving.link == job.link && !serving.cancelled)
            }
        }
    }

    fn job_over(&mut self, job: Job, copied: Result<Kind, Refusal>) {
        self.drop_job_source(&job);
        match job.why {
            Why::Push { tag, serial, index } => self.push_copied(tag, serial, index, &job.strips, copied),
            Why::Serve { peer, ticket, place, medium, owner } => {
                self.served(&peer, ticket, place, job.link, copied.map(|via| (via, medium, owner)));
            }
        }
    }

    fn drop_job_source(&mut self, job: &Job) {
        if let Some(store) = self.stores.get_mut(job.store) {
            store.pool.end_copy(job.source);
        }
    }

    /// A copy that never began is given up, and whoever wanted it has been (or will be) told otherwise.
    pub(super) fn drop_job(&mut self, job: Job) {
        self.drop_job_source(&job);
    }

    /// Gives up the waiting copies to a peer that satisfy `which`; returns how many.
    pub(super) fn drop_waiting(&mut self, peer: &NodeId, which: impl Fn(&Job) -> bool) -> usize {
        let Some(link) = self.links.get_mut(peer) else { return 0 };
        let (dropped, kept): (Vec<Job>, Vec<Job>) = link.waiting.drain(..).partition(which);
        link.waiting = kept.into();
        let count = dropped.len();
        dropped.into_iter().for_each(|job| self.drop_job(job));
        count
    }
}
