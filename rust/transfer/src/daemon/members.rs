//! The daemons that the configuration lists as members: each is dialled, and dialled again, and who it is, it says itself.

use std::sync::Arc;
use std::time::Duration;

use crate::engine::Input;
use crate::error::Error;
use crate::link::{Link, now};
use crate::messages::Purpose;
use crate::types::{Nanos, NodeAddress};

use super::{Actor, Happening, OUTAGE, REDIAL, Shared, connect, serve_peer};

/// One of the list.
struct Listed {
    address: String,
    /// Who it was when it was last reached.
    peer: Option<NodeAddress>,
    /// It is this daemon.
    me: bool,
    dialled: bool,
    due: Nanos,
    pause: Duration,
    /// Since when it has not been reached; and whether the log has said so.
    away: Nanos,
    told: bool,
}

/// All of them.
pub(super) struct Members(Vec<Listed>);

impl Members {
    pub fn new(addresses: &[String]) -> Self {
        let listed = |address: &String| Listed {
            address: address.clone(),
            peer: None,
            me: false,
            dialled: false,
            due: 0,
            pause: REDIAL.0,
            away: now(),
            told: false,
        };
        Self(addresses.iter().map(listed).collect())
    }
}

impl Actor {
    /// Tells the engine who they are, as far as that is known.
    pub(super) fn list_members(&mut self) {
        if self.members.0.is_empty() {
            return;
        }
        let others = || self.members.0.iter().filter(|listed| !listed.me);
        let known = others().filter_map(|listed| listed.peer.clone()).collect();
        let strangers = others().filter(|listed| listed.peer.is_none()).map(|listed| listed.address.clone()).collect();
        self.feed(Input::Members { known, strangers });
    }

    /// At each tick: dials those with whom there is no session.
    pub(super) fn dial_members(&mut self) {
        for at in 0..self.members.0.len() {
            let listed = &self.members.0[at];
            let up = listed.peer.as_ref().is_some_and(|peer| self.peers.contains_key(&peer.node));
            if listed.me || listed.dialled || up || listed.due > now() {
                continue;
            }
            let started = Link::new().and_then(|link| {
                let (shared, until, address) = (self.shared.clone(), link.clone(), listed.address.clone());
                self.shared.threads.spawn("member", &link, move || {
                    if let Err(error) = meet(&shared, at, &address, &until) {
                        tracing::debug!(address, "a member is not reached: {error}");
                    }
                    shared.tell(Happening::MemberGone { at });
                })
            });
            match started {
                Ok(()) => self.members.0[at].dialled = true,
                Err(error) => {
                    tracing::debug!("a member is not dialled: {error}");
                    self.member_gone(at);
                }
            }
        }
    }

    pub(super) fn member_up(&mut self, at: usize, peer: NodeAddress) {
        let me = peer.node == self.shared.me.node;
        let listed = &mut self.members.0[at];
        (listed.me, listed.pause, listed.told) = (me, REDIAL.0, false);
        if listed.peer.as_ref() != Some(&peer) {
            listed.peer = Some(peer);
            self.list_members();
        }
    }

    pub(super) fn member_gone(&mut self, at: usize) {
        let listed = &mut self.members.0[at];
        if listed.pause == REDIAL.0 {
            listed.away = now();
        }
        if !listed.me && !listed.told && now() - listed.away >= OUTAGE.as_nanos() as u64 {
            listed.told = true;
            tracing::warn!("the member at {} cannot be reached; trying on", listed.address);
        }
        listed.dialled = false;
        listed.due = now() + listed.pause.as_nanos() as u64;
        listed.pause = (listed.pause * 2).min(REDIAL.1);
    }
}

/// Keeps a session with whoever listens there, until it ends.
fn meet(shared: &Arc<Shared>, at: usize, address: &str, link: &Link) -> Result<(), Error> {
    let purpose = Purpose::Peer { node: shared.me.clone() };
    let (connection, peer) = match connect(shared, address, purpose, link) {
        Ok(found) => found,
        // This daemon refuses a peer of its own name, which says enough.
        Err(error) if error.message.contains("your node id is mine") => {
            shared.tell(Happening::MemberUp { at, peer: shared.me.clone() });
            return Ok(());
        }
        Err(error) => return Err(error),
    };
    if !shared.doors.knows(&peer) {
        return Err(Error::retry(format!("a later life of {} is known", peer.node)));
    }
    shared.tell(Happening::MemberUp { at, peer: peer.clone() });
    serve_peer(shared, connection, shared.threads.number(), &peer, link, true);
    Ok(())
}
