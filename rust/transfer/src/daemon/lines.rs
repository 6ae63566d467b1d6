//! Questions about names, straight from thread to thread: whoever has the client's connection, or the client itself within
//! this process, asks the home's daemon on a connection that is for such questions only, and the thread that has its other
//! end answers from the book (`objects/book.rs`). What is not known there for sure is asked again by the engine.

use std::collections::{BTreeMap, HashMap};
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
        let mut groups: BTreeMap<NodeId, (NodeAddress, Vec<usize>)> = BTreeMap::new();
        {
            let book = book.read().unwrap_or_else(PoisonError::into_inner);
            for (at, key) in keys.iter().enumerate() {
                let home = book.homes.home(key)?;
                if *home == shared.me.node {
                    found[at] = book.exists(key)?;
                } else if let Some((_, places)) = groups.get_mut(home) {
                    places.push(at);
                } else {
                    let peer = book.joined.values().find(|peer| peer.node == *home)?;
                    groups.insert(home.clone(), (peer.clone(), vec![at]));
                }
            }
        }
        let lines: Vec<(Line, NodeAddress, Vec<usize>)> =
            groups.into_values().map(|(peer, places)| (self.line(&peer), peer, places)).collect();
        // By name, so that no two who ask several wait for each other. All are asked before the first has answered.
        let mut asked: Vec<(MutexGuard<'_, Option<Connection>>, &[usize])> = Vec::new();
        let mut good = true;
        for (line, peer, places) in &lines {
            let mut line = lock(line);
            let names = places.iter().map(|at| keys[*at]).collect();
            good &= ask(shared, &mut line, peer, names).is_some();
            asked.push((line, places));
        }
        let until = Instant::now() + ANSWER_WITHIN;
        for (line, places) in &mut asked {
            let answer = line.as_mut().map(|line| line.ask(&[], until));
            let known = match answer {
                Some(Ok(Some(payload))) => match wire::decode(&payload) {
                    Ok(PeerMessage::Objects(Talk::Existing { found })) if found.len() == places.len() => Some(found),
                    _ => None,
                },
                _ => None,
            };
            if known.is_none() {
                // Its answer may still come, and must not be taken for that to another question.
                **line = None;
            }
            for (at, known) in places.iter().zip(known.into_iter().flatten()) {
                good &= known.is_some();
                found[*at] = known == Some(true);
            }
            good &= line.is_some();
        }
        good.then_some(found)
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

/// Sends a question, on a new connection if there is none. `None`: that cannot be; then there is no connection.
fn ask(shared: &Shared, line: &mut Option<Connection>, peer: &NodeAddress, keys: Vec<BlockKey>) -> Option<()> {
    if line.is_none() {
        let purpose = Purpose::Ask { node: shared.me.clone() };
        let (connection, found) = connect(shared, &peer.address, purpose, &Link::new().ok()?).ok()?;
        let mut connection =
            (found.node == peer.node && found.incarnation == peer.incarnation).then_some(connection)?;
        connection.unwatch();
        *line = Some(connection);
    }
    let question = wire::encode(&PeerMessage::Objects(Talk::Exist { keys }));
    let told = line.as_mut()?.tell(&question);
    if told.is_err() {
        *line = None;
    }
    told.ok()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Under these locks nothing is left half done by a panic: at worst a connection with an answer that nobody waits for.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
