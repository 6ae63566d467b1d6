//! Questions about names, straight from thread to thread: whoever has the client's connection, or the client itself within
//! this process, asks the home's daemon on a connection that is for such questions only, and the thread that has its other
//! end answers from the book (`objects/book.rs`). What is not known there for sure is asked again by the engine.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

use crate::link::{Connection, Link};
use crate::messages::{PeerMessage, Purpose};
use crate::objects::book::Book;
use crate::objects::messages::BATCH_LIMIT;
use crate::objects::talk::Talk;
use crate::session::Ended;
use crate::types::{BlockKey, Incarnation, NodeAddress, NodeId};
use crate::wire;

use super::{Shared, connect};

/// How long an answer may take: half of what the engine then has, which asks again.
const ANSWER_WITHIN: Duration = Duration::from_millis(1500);
/// Homes that are asked one after the other; more are asked at once, by the engine.
const HOMES: usize = 2;

/// The way to one life of a member; `None` before the first question, and after a failure.
type Line = Arc<Mutex<Option<Connection>>>;

/// All ways to members, and from them.
#[derive(Default)]
pub(super) struct Lines {
    to: Mutex<HashMap<NodeId, (Incarnation, Line)>>,
    /// What ends those of members who ask here.
    from: Mutex<HashMap<NodeId, Vec<Link>>>,
}

impl Lines {
    /// Per key whether it is anywhere. `None`: the engine is to be asked.
    pub fn look(&self, shared: &Shared, book: &RwLock<Book>, keys: &[BlockKey]) -> Option<Vec<bool>> {
        let mut found = vec![false; keys.len()];
        let mut groups: Vec<(NodeAddress, Vec<usize>)> = Vec::new();
        {
            let book = book.read().unwrap_or_else(PoisonError::into_inner);
            for (at, key) in keys.iter().enumerate() {
                let home = book.homes.home(key)?;
                if *home == shared.me.node {
                    found[at] = book.exists(key)?;
                    continue;
                }
                match groups.iter_mut().find(|(peer, _)| peer.node == *home) {
                    Some((_, places)) => places.push(at),
                    None => groups.push((book.joined.values().find(|peer| peer.node == *home)?.clone(), vec![at])),
                }
            }
        }
        if groups.len() > HOMES {
            return None;
        }
        for (peer, places) in groups {
            let names = places.iter().map(|at| keys[*at]).collect();
            let known = self.ask(shared, &peer, names)?;
            if known.len() != places.len() {
                return None;
            }
            for (at, known) in places.into_iter().zip(known) {
                found[at] = known?;
            }
        }
        Some(found)
    }

    fn ask(&self, shared: &Shared, peer: &NodeAddress, keys: Vec<BlockKey>) -> Option<Vec<Option<bool>>> {
        let line = self.line(peer);
        let mut line = lock(&line);
        if line.is_none() {
            let purpose = Purpose::Ask { node: shared.me.clone() };
            let (connection, found) = connect(shared, &peer.address, purpose, &Link::new().ok()?).ok()?;
            let mut connection =
                (found.node == peer.node && found.incarnation == peer.incarnation).then_some(connection)?;
            connection.unwatch();
            *line = Some(connection);
        }
        let question = wire::encode(&PeerMessage::Objects(Talk::Exist { keys }));
        let answer = line.as_mut()?.ask(&[question], Instant::now() + ANSWER_WITHIN);
        match answer {
            Ok(Some(payload)) => match wire::decode(&payload) {
                Ok(PeerMessage::Objects(Talk::Existing { found })) => Some(found),
                _ => None,
            },
            // Its answer may still come, and must not be taken for that to another question.
            _ => {
                *line = None;
                None
            }
        }
    }

    fn line(&self, peer: &NodeAddress) -> Line {
        let mut to = lock(&self.to);
        let (life, line) = to.entry(peer.node.clone()).or_default();
        if *life != peer.incarnation {
            (*life, *line) = (peer.incarnation, Line::default());
        }
        line.clone()
    }

    /// Serves whoever asks here.
    pub fn serve(&self, book: &RwLock<Book>, mut connection: Connection, node: &NodeId, link: &Link) {
        lock(&self.from).entry(node.clone()).or_default().push(link.clone());
        connection.welcome();
        // Whoever asks is silent between questions; that it is gone, its other session tells.
        connection.unwatch();
        let ended = connection.converse(|payload, _| match wire::decode(&payload)? {
            PeerMessage::Objects(Talk::Exist { mut keys }) => {
                keys.truncate(BATCH_LIMIT);
                let book = book.read().unwrap_or_else(PoisonError::into_inner);
                let found = keys.iter().map(|key| book.exists(key)).collect();
                Ok(Some(wire::encode(&PeerMessage::Objects(Talk::Existing { found }))))
            }
            _ => Err(Ended::Closed("this connection is for questions about names".into())),
        });
        tracing::debug!(peer = %node, "its line for questions: {ended}");
        if let Some(links) = lock(&self.from).get_mut(node) {
            links.retain(|known| !known.is(link));
        }
    }

    /// A member is gone.
    pub fn forget(&self, node: &NodeId) {
        lock(&self.to).remove(node);
        let links = lock(&self.from).remove(node).unwrap_or_default();
        links.iter().for_each(|link| link.close("the peer is gone"));
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Under these locks nothing is left half done by a panic: at worst a connection with an answer that nobody waits for.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
