//! How nodes begin and end, and how all comes to its end.

use pyengine_transfer::engine::Settings;
use pyengine_transfer::memory::slot_bytes;
use pyengine_transfer::messages::{DaemonOrder, GrantMode, LocalRequest};
use pyengine_transfer::pool::account::Quota;

use crate::blocks::{Fill, Kind, LAYOUTS, LIMITED, Part, ROOT, Task, all_prompts, key, kinds, tenant};
use crate::model::{MILLISECOND, Model};

impl Model {
    /// A node begins, or begins again: after a stop, a kill, or a loss of power.
    pub fn start(&mut self, node: &str) {
        self.clients.retain(|(at, _)| at != node);
        self.tasks.retain(|(at, ..), _| at != node);
        self.rotten.retain(|(at, ..)| at != node);
        // What was deleted and is not durably so may be back.
        self.banished.retain(|(at, _)| at != node);
        // Some layouts have the least there is for a while.
        let pages = 28 + self.random.below(24);
        let bytes = 4096 + pages * slot_bytes(LAYOUTS[0]).expect("possible");
        self.memory.insert(node.into(), bytes);
        if self.books.contains_key(node) {
            self.end_life(node);
        }
        // Owners are told apart not at all, by namespace and tenant, or one has a limit.
        let limit = bytes / 2 + self.random.below(bytes / 2);
        let (quotas, limit) = match self.random.below(3) {
            0 => (Vec::new(), None),
            1 => (vec![Quota::default()], None),
            _ => (vec![Quota { tenant: Some(LIMITED), dram_bytes: Some(limit), ..Quota::default() }], Some(limit)),
        };
        self.limits.insert(node.into(), limit);
        let settings = Settings { copies_in_flight: 3, quotas, ..Settings::new(bytes) };
        let (behind, seed) = (self.behind.get_mut(node).expect("each has some"), self.random.bits());
        let address = self.world.start_behind(node, settings, |bell| behind.open(seed, bell));
        self.addresses.insert(node.into(), address);
        // What the old life said last is no part of the new one's.
        self.handle_events();
        let next = self.engine(node).next_sequence();
        let books = self.books.entry(node.into()).or_default();
        books.begin(next);
        self.done.add("kept", books.expected());
        self.order(node, DaemonOrder::Dump);
        self.objects.entry(node.into()).or_default();
        // In any order; all are there from the start, so that what fits does not change.
        let mut all: Vec<Kind> = kinds().collect();
        let first = self.random.below(all.len() as u64) as usize;
        all.rotate_left(first);
        all.into_iter().for_each(|kind| self.attach(node, kind));
        self.begin_objects(node);
    }

    fn end_life(&mut self, node: &str) {
        self.handle_events();
        self.sync_objects(node);
        let stops = self.random.permille(400);
        let all = stops && self.behind[node].keeps_all() && !self.sick.contains(node);
        if stops {
            self.world.stop(node);
            self.take_reports();
        }
        let books = self.books.get_mut(node).expect("it was begun");
        let objects = self.objects.get_mut(node).expect("each has some");
        objects.end(&self.behind[node], all, books.is_spoiled());
        books.end(&self.behind[node], all);
        self.world.kill(node);
        self.take_reports();
        let behind = self.behind.get_mut(node).expect("each has some");
        if self.random.permille(600) {
            behind.lose_power(&mut self.random);
        }
        if self.random.permille(700) {
            behind.heal();
            self.sick.remove(node);
        }
    }

    /// Everybody ends; links and disks are whole. Then nothing may be left but the cache.
    pub fn finish(&mut self) {
        // Longer than the silence after which a cut session ends, where sessions are cut.
        let quiet = if self.calm { 500 } else { 4_000 } * MILLISECOND;
        let nodes = self.nodes.clone();
        for node in &nodes {
            nodes.iter().for_each(|other| self.world.heal(node, other));
            self.world.listen(node);
            self.behind[*node].heal();
            self.world.act(node, |engine, _, _| engine.drain(false));
            self.end_objects(node);
        }
        self.pass();
        for _ in 0..2 {
            for (node, client, tag) in self.tasks.keys().cloned().collect::<Vec<_>>() {
                self.end(&node, client, tag);
            }
            self.world.run(quiet);
            self.handle_events();
        }
        for node in nodes {
            let engine = self.engine(node);
            engine.check();
            assert!(engine.idle(), "{node} is not idle: {:#?}", engine.unfinished());
            for layout in engine.status().layouts {
                assert_eq!(layout.slots, layout.free + layout.cached, "{node} has lost slots: {layout:?}");
            }
            self.order(node, DaemonOrder::Dump);
            self.expect_flushed(node);
        }
    }

    /// A disk that does well again is used again.
    fn expect_flushed(&mut self, node: &str) {
        if self.behind[node].has_room() {
            // It is tried again after a minute at the latest, of its own time: ten milliseconds of it pass in each tick.
            for _ in 0..700 {
                if !self.behind[node].keeps_all() {
                    self.world.run(1_000 * MILLISECOND);
                    self.handle_events();
                }
            }
            // The engine lets a second pass after a write that failed.
            self.world.run(1_500 * MILLISECOND);
            self.handle_events();
            let (ticket, client) = (self.tag().request, self.pick_client(node, None).expect("each node has some"));
            let before = self.flushed.len();
            self.flush(node, ticket);
            self.world.request(node, client, LocalRequest::Flush { ticket });
            self.world.run(5_000 * MILLISECOND);
            self.handle_events();
            assert_eq!(
                self.flushed[before..],
                [(ticket, true)],
                "{node} cannot write: {}",
                self.behind[node].describe()
            );
        }
    }

    /// All lose their power at once, and begin again. What they still have is right.
    pub fn read_back(&mut self) {
        for node in self.nodes.clone() {
            self.start(node);
            self.behind[node].heal();
        }
        self.sick.clear();
        for node in self.nodes.clone() {
            for kind in kinds() {
                for keys in all_prompts(kind) {
                    let client = self.pick_client(node, Some(kind)).expect("each node has one");
                    let (before, tag) = (self.done.of("read"), self.tag());
                    let part = Part::holder(Fill::Fetch(Vec::new()));
                    self.begin(node, client, tag, Task { keys, private: false, part });
                    // Granted; then read.
                    self.handle_events();
                    self.world.run(200 * MILLISECOND);
                    self.handle_events();
                    self.end(node, client, tag);
                    self.done.add("back", self.done.of("read") - before);
                }
            }
        }
        self.finish();
    }

    /// After all that, a plain request goes through: nothing is stuck.
    pub fn expect_alive(&mut self) {
        let before = self.done.of("completed");
        let (tag, local, kind) = (self.tag(), self.tag(), kinds().next().expect("there is one"));
        self.pushed_as.insert(local, tag);
        let keys: Vec<_> = (0..3).map(|position| key(kind, 9, position)).collect();
        let holder = self.pick_client("a", Some(kind)).expect("each node has one");
        let pusher = self.pick_client("b", Some(kind)).expect("each node has one");
        let push = Part::pusher(self.addresses["a"].clone(), local);
        let parts = [
            ("a", holder, tag, Part::holder(Fill::Pushed)),
            ("b", pusher, local, Part::holder(Fill::Own)),
            ("b", pusher, tag, push),
        ];
        for (node, client, tag, part) in parts {
            let task = Task { keys: keys.clone(), private: true, part };
            let request = match &task.part {
                Part::Pusher { to, .. } => LocalRequest::Open { tag, to: to.clone(), within_ms: 5000 },
                _ => LocalRequest::Grant {
                    tag,
                    keys: keys.clone(),
                    private: 1,
                    parent: ROOT,
                    position: 0,
                    mode: GrantMode::Wait,
                    tenant: tenant(&keys),
                },
            };
            self.tasks.insert((node.into(), client, tag), task);
            self.world.request(node, client, request);
        }
        for _ in 0..100 {
            self.world.run(20 * MILLISECOND);
            self.handle_events();
        }
        assert_eq!(self.done.of("completed"), before + 1, "a plain request did not go through: {:?}", self.tasks);
        self.finish();
    }
}
