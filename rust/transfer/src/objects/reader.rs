//! The daemon's side of a client's reads: answered from the catalog by the thread that has the client's connection.

use std::sync::Arc;

use rustc_hash::FxHashMap;

use super::catalog::{Catalog, Hold, List};
use super::messages::{BATCH_LIMIT, LIST_LIMIT, ObjectEvent, ObjectRequest};
use crate::memory::Arena;
use crate::types::{BlockKey, Medium};

/// Pins that one client may have.
const PIN_LIMIT: usize = 1 << 17;

/// What one client reads. Its pins end with it.
#[derive(Debug)]
pub struct Reader {
    catalog: Arc<Catalog>,
    pins: FxHashMap<u64, Hold>,
    next: u64,
}

/// What comes of a request.
#[derive(Debug)]
pub enum Answer {
    /// Tell the client, with the descriptor of this arena beside it.
    Tell(ObjectEvent, Option<Arc<Arena>>),
    /// Nothing is to be told.
    Done,
    /// It is for the engine.
    Pass(ObjectRequest),
}

impl Reader {
    /// Nothing is pinned yet.
    pub fn new(catalog: Arc<Catalog>) -> Self {
        Self { catalog, pins: FxHashMap::default(), next: 1 }
    }

    /// Answers what can be answered here.
    pub fn answer(&mut self, request: ObjectRequest) -> Answer {
        let event = match request {
            ObjectRequest::Pin { ticket, mut keys, names } => {
                keys.truncate(BATCH_LIMIT);
                if self.pins.len() + keys.len() > PIN_LIMIT {
                    let limit = PIN_LIMIT as u64;
                    return Answer::Tell(ObjectEvent::TooManyPins { ticket, limit }, None);
                }
                let (first, holds) = (self.next, self.catalog.pin(&keys, names));
                self.next += holds.len() as u64;
                let mut found = Vec::with_capacity(holds.len());
                for (pin, seen) in (first..).zip(holds) {
                    found.push(seen.map(|hold| {
                        let at = hold.at();
                        self.pins.insert(pin, hold);
                        at
                    }));
                }
                ObjectEvent::Pinned { ticket, first, found }
            }
            ObjectRequest::Release { pins } => {
                pins.iter().for_each(|pin| drop(self.pins.remove(pin)));
                return Answer::Done;
            }
            ObjectRequest::Arena { ticket, region } => match self.catalog.arena(region) {
                None => ObjectEvent::NoArena { ticket },
                Some(arena) => {
                    let (slots, layout, bytes) = (arena.slots(), arena.layout(), arena.bytes());
                    return Answer::Tell(ObjectEvent::Arena { ticket, region, slots, layout, bytes }, Some(arena));
                }
            },
            request => match read_only(&self.catalog, request) {
                Ok(event) => event,
                Err(request) => return Answer::Pass(request),
            },
        };
        Answer::Tell(event, None)
    }
}

/// Answers what asks the catalog and pins nothing.
///
/// # Errors
/// The request, if it is none of those.
pub fn read_only(catalog: &Arc<Catalog>, request: ObjectRequest) -> Result<ObjectEvent, ObjectRequest> {
    match request {
        ObjectRequest::Contains { ticket, mut keys } => {
            keys.truncate(BATCH_LIMIT);
            let mut found = catalog.contains(&keys);
            if catalog.is_elsewhere() && found.contains(&None) {
                let missing: Vec<BlockKey> =
                    keys.iter().zip(&found).filter(|(_, medium)| medium.is_none()).map(|(key, _)| *key).collect();
                let Some(there) = catalog.look_elsewhere(&missing) else {
                    return Err(ObjectRequest::Contains { ticket, keys });
                };
                let missing = found.iter_mut().filter(|medium| medium.is_none());
                missing.zip(there).for_each(|(medium, there)| *medium = there.then_some(Medium::Dram));
            }
            Ok(ObjectEvent::Contained { ticket, found })
        }
        ObjectRequest::List { ticket, prefix, from, limit } => {
            let List { objects, behind, next } = catalog.list(&prefix, from, limit.clamp(1, LIST_LIMIT) as usize);
            Ok(ObjectEvent::Listed { ticket, objects, behind, next })
        }
        ObjectRequest::Stats { ticket } => Ok(ObjectEvent::Stats { ticket, stats: catalog.stats() }),
        request => Err(request),
    }
}
