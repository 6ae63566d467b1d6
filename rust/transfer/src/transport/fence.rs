//! Nothing is written late: a path that was lost is ended at its target before anything else is written there.
//!
//! Bytes of a lost path may still lie in the network, in the target's kernel, or be in the hands of its threads. Whoever
//! was told of the loss goes on and writes there again. So every path has a number, and:
//!
//! ```text
//! dialler (Trail)                                            target (Fences)
//!   path 4 breaks, its writes have no answer: lost = {4}       4 stands: its bytes may still come
//!   something is to be written, by any path:
//!   path 5: -- FENCE {4} ---------------------------------->   4 is asked to end ... nothing of it is left
//!   lost = {}  <------------------------------- its answer -
//!   path 5: -- WRITE -------------------------------------->
//! ```
//!
//! One [`Fences`] serves all transports of a process, so what shm has lost is fenced by tcp. Reads need nothing of this:
//! their destination is here, and quiet when they are told to be lost.
//!
//! # Limits
//!
//! A path writes only after all that were lost before have been struck off, so those on a list have stood side by side: as
//! many as a peer may have lanes and rdma paths. Trails are kept while they are in use or say something, [`TRAILS_LIMIT`] of
//! them; beyond, the one of the peer that started longest ago is forgotten. The target remembers the paths that stand.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};

use crate::error::Error;
use crate::types::{Incarnation, NodeAddress, NodeId};

/// Trails that are kept.
const TRAILS_LIMIT: usize = 1 << 14;

/// A number that no other path of this process has.
pub fn next_path() -> u64 {
    static LAST: AtomicU64 = AtomicU64::new(0);
    LAST.fetch_add(1, Ordering::Relaxed) + 1
}

/// Which paths to one life of a peer were lost with writes under way, and are not known to have ended there.
#[derive(Debug, Default)]
pub struct Trail {
    lost: Mutex<BTreeSet<u64>>,
    /// The list is not empty.
    unclean: AtomicBool,
}

impl Trail {
    /// A path has broken and writes on it have no answer. To be called before anybody is told of their loss.
    pub fn lost(&self, path: u64) {
        self.change(|lost| lost.insert(path));
    }

    /// True if anything may be written. If not, the peer must be told of `paths` first.
    pub fn is_clean(&self) -> bool {
        !self.unclean.load(Ordering::Acquire)
    }

    /// What the peer must be told.
    pub fn paths(&self) -> Vec<u64> {
        lock(&self.lost).iter().copied().collect()
    }

    /// The peer has answered that of these paths nothing is left.
    pub fn ended(&self, paths: &[u64]) {
        self.change(|lost| lost.retain(|path| !paths.contains(path)));
    }

    fn change<R>(&self, change: impl FnOnce(&mut BTreeSet<u64>) -> R) {
        let mut lost = lock(&self.lost);
        change(&mut lost);
        self.unclean.store(!lost.is_empty(), Ordering::Release);
    }
}

/// What all transports of a process know of its lost paths, and of the paths that peers have made to it. Clones are the
/// same.
#[derive(Clone, Default)]
pub struct Fences(Arc<Shared>);

#[derive(Default)]
struct Shared {
    trails: Mutex<BTreeMap<(NodeId, Incarnation), Arc<Trail>>>,
    guests: Mutex<BTreeMap<Key, Arc<Entry>>>,
}

/// Whose path, in which life, and its number.
type Key = (NodeId, Incarnation, u64);

/// Asks a path to end, for this reason. It returns at once.
type End = Arc<dyn Fn(&str) + Send + Sync>;

/// Called when a path that was to end has ended.
type Wake = Arc<dyn Fn() + Send + Sync>;

#[derive(Default)]
struct Entry(Mutex<Stay>);

#[derive(Default)]
struct Stay {
    over: Over,
    /// Why it is to end.
    doomed: Option<String>,
    end: Option<End>,
    wakes: Vec<Wake>,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Over {
    #[default]
    No,
    Yes,
    /// Its memory is never given back.
    Never,
}

impl Fences {
    /// The trail that this process has left at one life of a peer.
    pub fn trail(&self, peer: &NodeAddress) -> Arc<Trail> {
        let mut trails = lock(&self.0.trails);
        let key = (peer.node.clone(), peer.incarnation);
        if let Some(trail) = trails.get(&key) {
            return trail.clone();
        }
        // A life that is over writes nothing any more.
        trails.retain(|(node, life), trail| {
            let past = *node == peer.node && *life < peer.incarnation;
            Arc::strong_count(trail) > 1 || !(past || trail.is_clean())
        });
        if trails.len() >= TRAILS_LIMIT {
            let unused = trails.iter().filter(|(_, trail)| Arc::strong_count(trail) == 1);
            let oldest = unused.min_by_key(|((_, life), _)| *life).map(|(key, _)| key.clone());
            oldest.and_then(|key| trails.remove(&key));
        }
        trails.entry(key).or_default().clone()
    }

    /// A peer's path is to be welcomed. Paths of earlier lives of that peer have ended when this returns.
    ///
    /// # Errors
    /// Give up: a later life of it has paths here. Bug: that number is in use.
    pub fn enter(&self, from: &NodeAddress, path: u64) -> Result<Guest, Error> {
        let key = (from.node.clone(), from.incarnation, path);
        let (entry, earlier) = {
            let mut guests = self.guests();
            let after = (from.node.clone(), from.incarnation, u64::MAX);
            if guests.range(after..).next().is_some_and(|((node, ..), _)| *node == from.node) {
                return Err(Error::give_up(crate::lives::STALE));
            }
            if guests.contains_key(&key) {
                return Err(Error::bug(format!("your path {path} stands already: each needs a number of its own")));
            }
            let entry = Arc::<Entry>::default();
            guests.insert(key.clone(), entry.clone());
            (entry, earlier_lives(&guests, &from.node, from.incarnation))
        };
        let guest = Guest { fences: self.clone(), key, entry };
        wait_for(earlier, "a later life of the peer is here");
        Ok(guest)
    }

    /// Paths of a peer are to end: those of its paths that there still are. `wake` is called, from any thread, whenever one
    /// of them has ended.
    pub fn fence(&self, from: &NodeAddress, paths: &[u64], wake: impl Fn() + Send + Sync + 'static) -> Fencing {
        let entries: Vec<Arc<Entry>> = {
            let guests = self.guests();
            let key = |path: &u64| (from.node.clone(), from.incarnation, *path);
            paths.iter().filter_map(|path| guests.get(&key(path)).cloned()).collect()
        };
        ask(entries, "the peer has lost it", &(Arc::new(wake) as Wake))
    }

    /// The paths of those lives of a peer that began before this one are to end. It returns at once.
    pub fn close(&self, peer: &NodeId, before: Incarnation, reason: &str) -> Fencing {
        let earlier = earlier_lives(&self.guests(), peer, before);
        ask(earlier, reason, &(Arc::new(|| {}) as Wake))
    }

    fn guests(&self) -> MutexGuard<'_, BTreeMap<Key, Arc<Entry>>> {
        lock(&self.0.guests)
    }
}

fn earlier_lives(guests: &BTreeMap<Key, Arc<Entry>>, node: &NodeId, before: Incarnation) -> Vec<Arc<Entry>> {
    guests.range((node.clone(), 0, 0)..(node.clone(), before, 0)).map(|(_, entry)| entry.clone()).collect()
}

fn ask(entries: Vec<Arc<Entry>>, reason: &str, wake: &Wake) -> Fencing {
    for entry in &entries {
        let end = {
            let mut stay = lock(&entry.0);
            if stay.over == Over::Yes {
                continue;
            }
            stay.wakes.push(wake.clone());
            stay.doomed.get_or_insert_with(|| reason.into());
            stay.end.clone()
        };
        if let Some(end) = end {
            end(reason);
        }
    }
    Fencing(entries)
}

fn wait_for(entries: Vec<Arc<Entry>>, reason: &str) {
    let (tell, told) = mpsc::channel();
    let wake: Wake = Arc::new(move || {
        // Whoever waited has seen enough.
        let _ = tell.send(());
    });
    let Fencing(entries) = ask(entries, reason, &wake);
    drop(wake);
    // What is never given back is nobody's any more, so nobody waits for it.
    while entries.iter().any(|entry| lock(&entry.0).over == Over::No) {
        if told.recv().is_err() {
            return;
        }
    }
}

/// Paths that have been asked to end.
pub struct Fencing(Vec<Arc<Entry>>);

impl Fencing {
    /// True once nothing of any of them is left.
    pub fn is_over(&self) -> bool {
        self.0.iter().all(|entry| lock(&entry.0).over == Over::Yes)
    }
}

/// A peer's path, from before its welcome until nothing is written here on its behalf any more: dropping it says so.
pub struct Guest {
    fences: Fences,
    key: Key,
    entry: Arc<Entry>,
}

impl Guest {
    /// Where to say how it is ended, also when the guest itself is in other hands.
    pub fn place(&self) -> Place {
        Place(self.entry.clone())
    }

    /// What it might still write can never be known to have ended: it is counted as standing for ever.
    pub fn never_over(self) {
        self.leave(Over::Never);
        std::mem::forget(self);
    }

    fn leave(&self, over: Over) {
        let wakes = {
            let mut stay = lock(&self.entry.0);
            (stay.over, stay.end) = (over, None);
            std::mem::take(&mut stay.wakes)
        };
        wakes.iter().for_each(|wake| wake());
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.fences.guests().remove(&self.key);
        self.leave(Over::Yes);
    }
}

/// Of a guest.
pub struct Place(Arc<Entry>);

impl Place {
    /// The path stands, and `end` asks it to end, from any thread, without waiting.
    ///
    /// # Errors
    /// Retry: it was to end before it stood. It has been asked to.
    pub fn stands(&self, end: impl Fn(&str) + Send + Sync + 'static) -> Result<(), Error> {
        let doomed = {
            let mut stay = lock(&self.0.0);
            match (&stay.doomed, stay.over) {
                (Some(reason), _) => Some(reason.clone()),
                (None, Over::No) => {
                    stay.end = Some(Arc::new(end));
                    return Ok(());
                }
                // It has ended already.
                (None, _) => return Ok(()),
            }
        };
        let reason = doomed.unwrap_or_default();
        end(&reason);
        Err(Error::retry(format!("the path was over before it stood: {reason}")))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Maps, sets and plain fields: single changes cannot be left half done.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    //! Goal: nobody is told that a path has ended before it has, and nobody waits for what is not there. Method: guests
    //! that come and go in every order.
    use std::sync::atomic::AtomicUsize;

    use super::*;

    fn node(name: &str, incarnation: Incarnation) -> NodeAddress {
        NodeAddress { node: name.into(), address: String::new(), incarnation }
    }

    /// A `wake` that counts.
    fn bell() -> (Arc<AtomicUsize>, impl Fn() + Send + Sync + 'static) {
        let rung = Arc::<AtomicUsize>::default();
        let mine = rung.clone();
        let ring = move || {
            mine.fetch_add(1, Ordering::SeqCst);
        };
        (rung, ring)
    }

    #[test]
    fn a_fence_is_over_when_its_paths_are() {
        let (fences, a) = (Fences::default(), node("a", 1));
        let (one, two) = (fences.enter(&a, 1).expect("new"), fences.enter(&a, 2).expect("new"));
        let elsewhere = fences.enter(&node("b", 1), 1).expect("another node's");
        let asked = Arc::<Mutex<Vec<&str>>>::default();
        for (guest, name) in [(&one, "one"), (&two, "two"), (&elsewhere, "elsewhere")] {
            let asked = asked.clone();
            guest.place().stands(move |_| lock(&asked).push(name)).expect("it stands");
        }
        let (rung, wake) = bell();
        let fencing = fences.fence(&a, &[1, 2, 3], wake);
        assert_eq!(*lock(&asked), ["one", "two"]);
        assert!(!fencing.is_over());
        drop(one);
        assert!(!fencing.is_over() && rung.load(Ordering::SeqCst) == 1);
        drop(two);
        assert!(fencing.is_over() && rung.load(Ordering::SeqCst) == 2);
        let (_, wake) = bell();
        assert!(fences.fence(&a, &[1, 2, 3], wake).is_over(), "nobody knows them any more");
        drop(elsewhere);
    }

    #[test]
    fn a_path_that_is_lost_before_it_stands_is_refused() {
        let (fences, a) = (Fences::default(), node("a", 1));
        let guest = fences.enter(&a, 1).expect("new");
        let (_, wake) = bell();
        let fencing = fences.fence(&a, &[1], wake);
        let (ended, end) = bell();
        let refused = guest.place().stands(move |_| end());
        assert!(refused.is_err_and(|error| error.message.contains("lost")));
        assert!(ended.load(Ordering::SeqCst) == 1 && !fencing.is_over(), "whoever has it lets go first");
        drop(guest);
        assert!(fencing.is_over());
    }

    #[test]
    fn a_later_life_ends_the_paths_of_an_earlier_one() {
        let fences = Fences::default();
        let earlier = Mutex::new(Some(fences.enter(&node("a", 1), 1).expect("new")));
        let other = fences.enter(&node("aa", 1), 1).expect("another node's");
        other.place().stands(|_| panic!("another node's")).expect("it stands");
        let earlier = Arc::new(earlier);
        let place = lock(&earlier).as_ref().map(Guest::place).expect("put there");
        let (held, seen) = (earlier.clone(), Arc::<AtomicUsize>::default());
        let counts = seen.clone();
        let end = move |_: &str| {
            counts.fetch_add(1, Ordering::SeqCst);
            // As an I/O thread would, a little later.
            let held = held.clone();
            std::thread::spawn(move || drop(lock(&held).take()));
        };
        place.stands(end).expect("it stands");
        let later = fences.enter(&node("a", 2), 1).expect("new");
        assert!(lock(&earlier).is_none() && seen.load(Ordering::SeqCst) == 1, "it was waited for");
        let kind = |refused: Result<Guest, Error>| refused.err().expect("refused").message;
        assert!(kind(fences.enter(&node("a", 1), 9)).contains("stale"));
        assert!(kind(fences.enter(&node("a", 2), 1)).contains("stands already"));
        // What can never be known to have ended is not waited for by the next life, but it is by whoever needs the truth.
        later.never_over();
        let (_, wake) = bell();
        assert!(!fences.fence(&node("a", 2), &[1], wake).is_over());
        drop(fences.enter(&node("a", 3), 1).expect("new"));
    }

    #[test]
    fn a_trail_is_kept_while_it_says_something() {
        let fences = Fences::default();
        let trail = |life| fences.trail(&node("a", life));
        trail(1).lost(4);
        trail(1).lost(7);
        assert!(!trail(1).is_clean() && trail(1).paths() == [4, 7]);
        trail(1).ended(&[4, 5]);
        assert_eq!(trail(1).paths(), [7]);
        drop(fences.trail(&node("b", 9)));
        assert!(!trail(1).is_clean(), "whatever else comes by");
        assert!(trail(2).is_clean());
        assert!(trail(1).is_clean(), "that life is over");
    }
}
