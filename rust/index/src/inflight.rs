//! Blocks that are not there yet and will be: the contract is in `scheduler/inflight.py`, where the plain twin stands.
//!
//! A request's promise is kept under a number that grows, so the oldest comes first. Under each key that is kept lie the
//! workers at which it is expected, and of each worker the requests that bring it.

use std::cmp::{Ordering, Reverse};
use std::collections::{BTreeMap, BinaryHeap, HashMap};

use crate::Key;

/// Tokens between two kept keys. What two prompts share beyond the last of them is computed twice.
const STRIDE_TOKENS: usize = 256;
/// Requests whose blocks are expected at once; beyond, the oldest is forgotten.
pub const MAX_REQUESTS: usize = 8192;
/// An expectation holds for so many times as long as was predicted, and so long at least (seconds).
const GRACE: f64 = 2.0;
const SHORTEST: f64 = 2.0;

/// A request's number at its gateway: whatever fits in 64 bits, with a sign or without.
pub type Number = i128;
/// The promise of one request; later ones have higher numbers.
type Promised = u64;
type Worker = usize;

/// What a worker and its node will have of a prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct Coming {
    /// For `Inflight::name`.
    pub worker: usize,
    /// Leading blocks of it.
    pub blocks: usize,
    /// When the last of them is there.
    pub ready: f64,
}

/// The promises by request, and the workers at which each key is expected.
#[derive(Default)]
pub struct Inflight {
    gateways: HashMap<String, HashMap<Number, Promised>>,
    promises: BTreeMap<Promised, Promise>,
    expected: HashMap<Key, Vec<Expected>>,
    ends: BinaryHeap<Reverse<End>>,
    workers: Workers,
    next: Promised,
    /// Of `find`, by worker: its place in the answer. It is all `NOWHERE` between two of them.
    place: Vec<usize>,
}

const NOWHERE: usize = usize::MAX;

/// One request's blocks: the keys that are kept, and when each worker has all of them.
struct Promise {
    gateway: String,
    number: Number,
    keys: Vec<Key>,
    workers: Vec<(Worker, f64)>,
    until: f64,
}

/// A block at one worker: when the first of the requests that bring it is through, and when each is.
struct Expected {
    worker: Worker,
    first: f64,
    requests: Vec<(Promised, f64)>,
}

impl Expected {
    fn soonest(&self) -> f64 {
        self.requests.iter().map(|&(_, ready)| ready).fold(f64::INFINITY, f64::min)
    }
}

impl Inflight {
    /// Nothing is expected.
    pub fn new() -> Self {
        Self::default()
    }

    /// Requests whose blocks are expected.
    pub fn len(&self) -> usize {
        self.promises.len()
    }

    /// Nothing is expected.
    pub fn is_empty(&self) -> bool {
        self.promises.is_empty()
    }

    /// The worker's name.
    pub fn name(&self, worker: usize) -> &str {
        &self.workers.names[worker].0
    }

    /// The request was planned. keys: of the prompt's full blocks; workers: when each will have all of them.
    pub fn add<'a>(
        &mut self,
        gateway: &str,
        number: Number,
        keys: &[Key],
        block_tokens: usize,
        workers: impl IntoIterator<Item = (&'a str, f64)>,
        now: f64,
    ) {
        self.end(gateway, number);
        let keys: Vec<Key> = marks(keys.len(), block_tokens).map(|n| keys[n - 1]).collect();
        if keys.is_empty() {
            return;
        }
        let workers: Vec<_> = workers.into_iter().map(|(name, ready)| (self.workers.take(name), ready)).collect();
        let last = workers.iter().map(|&(_, ready)| ready).fold(f64::NEG_INFINITY, f64::max);
        let until = now + f64::max(GRACE * (last - now), SHORTEST);
        let promised = self.next;
        self.next += 1;
        for key in &keys {
            let expected = self.expected.entry(*key).or_default();
            for &(worker, ready) in &workers {
                match expected.iter_mut().find(|each| each.worker == worker) {
                    Some(known) => {
                        known.first = known.first.min(ready);
                        known.requests.push((promised, ready));
                    }
                    None => expected.push(Expected { worker, first: ready, requests: vec![(promised, ready)] }),
                }
            }
        }
        match self.gateways.get_mut(gateway) {
            Some(numbers) => numbers.insert(number, promised),
            None => self.gateways.entry(gateway.to_owned()).or_default().insert(number, promised),
        };
        self.ends.push(Reverse(End { until, promised }));
        self.promises.insert(promised, Promise { gateway: gateway.to_owned(), number, keys, workers, until });
        self.expire(now);
        while self.promises.len() > MAX_REQUESTS {
            let (&oldest, _) = self.promises.first_key_value().expect("there are too many");
            self.drop(oldest);
        }
    }

    /// It is over, however: what it has left is in the index.
    pub fn end(&mut self, gateway: &str, number: Number) {
        if let Some(&promised) = self.gateways.get(gateway).and_then(|numbers| numbers.get(&number)) {
            self.drop(promised);
        }
    }

    /// The worker is gone: what it was to compute, or to receive, will not come.
    pub fn lost(&mut self, worker: &str) {
        let Some(&worker) = self.workers.numbers.get(worker) else { return };
        let its = |promise: &Promise| promise.workers.iter().any(|&(each, _)| each == worker);
        let lost: Vec<_> = self.promises.iter().filter(|(_, promise)| its(promise)).map(|(&each, _)| each).collect();
        for promised in lost {
            self.drop(promised);
        }
    }

    /// Promises that are late by far are none.
    pub fn expire(&mut self, now: f64) {
        while let Some(Reverse(end)) = self.ends.peek() {
            if end.until > now {
                break;
            }
            let promised = end.promised;
            self.ends.pop();
            self.drop(promised);
        }
        if self.ends.len() > 2 * MAX_REQUESTS {
            // Most are of requests that ended before.
            let ends = self.promises.iter().map(|(&promised, each)| Reverse(End { until: each.until, promised }));
            self.ends = ends.collect();
        }
    }

    /// What is expected of this prompt, once for each worker; who expects nothing is left out.
    pub fn find(&mut self, keys: &[Key], block_tokens: usize, now: f64) -> Vec<Coming> {
        let mut shared = Vec::new();
        for n in marks(keys.len(), block_tokens) {
            // None behind a key that nobody expects is expected, but for one that ends there.
            let Some(expected) = self.expected.get(&keys[n - 1]) else { break };
            shared.push((n, expected));
        }
        // Whoever expects a longer part expects the shortest.
        let everybody = shared.first().map_or(0, |(_, expected)| expected.len());
        let mut coming: Vec<Coming> = Vec::with_capacity(everybody);
        self.place.resize(self.workers.names.len(), NOWHERE);
        for &(blocks, expected) in shared.iter().rev() {
            if coming.len() == everybody {
                break;
            }
            for each in expected {
                let place = &mut self.place[each.worker];
                if *place == NOWHERE {
                    *place = coming.len();
                    coming.push(Coming { worker: each.worker, blocks, ready: each.first.max(now) });
                }
            }
        }
        for each in &coming {
            self.place[each.worker] = NOWHERE;
        }
        coming
    }

    fn drop(&mut self, promised: Promised) {
        let Some(promise) = self.promises.remove(&promised) else { return };
        if let Some(numbers) = self.gateways.get_mut(&promise.gateway) {
            numbers.remove(&promise.number);
            if numbers.is_empty() {
                self.gateways.remove(&promise.gateway);
            }
        }
        for key in &promise.keys {
            let expected = self.expected.get_mut(key).expect("a promise's keys are expected");
            for &(worker, ready) in &promise.workers {
                let place = expected.iter().position(|each| each.worker == worker).expect("at each of its workers");
                let known = &mut expected[place];
                let at = known.requests.iter().position(|&(each, _)| each == promised).expect("of this request");
                known.requests.swap_remove(at);
                if known.requests.is_empty() {
                    expected.swap_remove(place);
                } else if known.first == ready {
                    known.first = known.soonest();
                }
            }
            if expected.is_empty() {
                self.expected.remove(key);
            }
        }
        for (worker, _) in promise.workers {
            self.workers.leave(worker);
        }
    }

    /// Panics if the directions disagree.
    pub fn check(&self) {
        let told: usize = self.expected.values().flatten().map(|each| each.requests.len()).sum();
        let known: usize = self.promises.values().map(|each| each.keys.len() * each.workers.len()).sum();
        assert_eq!(told, known, "an expectation has no request, or a request's is forgotten");
        for (promised, promise) in &self.promises {
            assert_eq!(self.gateways[&promise.gateway][&promise.number], *promised, "a request is not found");
            for key in &promise.keys {
                for &(worker, ready) in &promise.workers {
                    let each = self.expected[key].iter().find(|each| each.worker == worker).expect("its worker");
                    assert!(each.requests.contains(&(*promised, ready)), "a request's expectation is forgotten");
                }
            }
        }
        for each in self.expected.values().flatten() {
            assert!(!each.requests.is_empty(), "an empty entry is kept");
            assert_eq!(each.first, each.soonest(), "a worker has a block at another time than its first request");
        }
        let requests: usize = self.gateways.values().map(HashMap::len).sum();
        assert_eq!(requests, self.promises.len(), "a request that is over is found");
        assert!(self.promises.len() <= MAX_REQUESTS, "too many requests are remembered");
        let mut uses = vec![0; self.workers.names.len()];
        self.promises.values().flat_map(|each| &each.workers).for_each(|&(worker, _)| uses[worker] += 1);
        assert!(self.workers.names.iter().map(|each| each.1).eq(uses), "a name is used more or less than counted");
    }
}

/// Numbers of leading blocks whose last key is kept, ascending.
fn marks(blocks: usize, block_tokens: usize) -> impl Iterator<Item = usize> {
    let stride = (STRIDE_TOKENS / block_tokens.max(1)).max(1);
    let last = (!blocks.is_multiple_of(stride)).then_some(blocks);
    (stride..=blocks).step_by(stride).chain(last)
}

/// When a promise is late by far; the earliest first.
#[derive(PartialEq)]
struct End {
    until: f64,
    promised: Promised,
}

impl Eq for End {}

impl PartialOrd for End {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for End {
    fn cmp(&self, other: &Self) -> Ordering {
        self.until.total_cmp(&other.until).then(self.promised.cmp(&other.promised))
    }
}

/// Small numbers for names in use, counted; a number is used again when its name is not.
#[derive(Default)]
struct Workers {
    numbers: HashMap<String, Worker>,
    names: Vec<(String, usize)>,
    free: Vec<Worker>,
}

impl Workers {
    fn take(&mut self, name: &str) -> Worker {
        let worker = self.numbers.get(name).copied().unwrap_or_else(|| {
            let worker = self.free.pop().unwrap_or(self.names.len());
            if worker == self.names.len() {
                self.names.push((String::new(), 0));
            }
            name.clone_into(&mut self.names[worker].0);
            self.numbers.insert(name.to_owned(), worker);
            worker
        });
        self.names[worker].1 += 1;
        worker
    }

    fn leave(&mut self, worker: Worker) {
        let (name, uses) = &mut self.names[worker];
        *uses -= 1;
        if *uses == 0 {
            self.numbers.remove(name);
            self.free.push(worker);
        }
    }
}
