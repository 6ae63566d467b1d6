//! Very many keys.
//!
//! Goal: a daemon with ten million blocks is right and quick: each input takes a short time, a dump and a list of keys come
//! in parts and have each block once, lookups find all, and memory grows by what the books may take. Method: an engine over
//! memory that is never touched, then one with few slots before a log whose disk keeps nothing, filled with
//! `PYENGINE_KEYS` blocks; what takes long is printed, never judged. By hand, for the figures:
//!
//! `PYENGINE_KEYS=10000000 cargo test --release -p pyengine-transfer --test many_keys -- --nocapture --test-threads 1`

use std::collections::BTreeMap;
use std::io::{self, IoSlice};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use pyengine_transfer::admin::{Cursor, Prefix};
use pyengine_transfer::engine::{Engine, Input, Output, Settings};
use pyengine_transfer::memory::slot_bytes;
use pyengine_transfer::messages::{DaemonOrder, DaemonReport, GrantMode, LocalEvent, LocalRequest};
use pyengine_transfer::pool::disk::Ssd;
use pyengine_transfer::pool::disk::io::{FileId, Medium as Disk};
use pyengine_transfer::random::Random;
use pyengine_transfer::types::{BlockKey, Layout, Medium, NodeAddress, Tag};

/// One page. (One strip of that size is an object.)
const LAYOUT: Layout = Layout { strips: 2, strip_bytes: 2048 };
/// Blocks of a prompt.
const PROMPT: u64 = 64;
const CLIENT: u64 = 1;
const SECOND: u64 = 1_000_000_000;

fn blocks() -> u64 {
    let wanted = std::env::var("PYENGINE_KEYS").ok().map(|text| text.parse().expect("a number"));
    wanted.unwrap_or(40_000_u64).next_multiple_of(PROMPT)
}

fn key(number: u64) -> BlockKey {
    let mut random = Random(number);
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&random.bits().to_le_bytes());
    bytes[8..].copy_from_slice(&number.to_le_bytes());
    BlockKey(bytes)
}

fn number(key: &BlockKey) -> u64 {
    u64::from_le_bytes(key.0[8..].try_into().expect("8 bytes"))
}

/// An engine and its one client, who measures how long each input takes.
struct Stage {
    engine: Engine,
    now: u64,
    requests: u64,
    longest: BTreeMap<&'static str, Duration>,
}

impl Stage {
    fn new(engine: Engine) -> Self {
        let mut stage = Self { engine, now: 0, requests: 0, longest: BTreeMap::new() };
        let attach = LocalRequest::Attach { ticket: 1, layout: LAYOUT, namespace: 1 };
        let told = stage.ask("attach", attach);
        assert!(matches!(told[..], [LocalEvent::Attached { .. }]), "{told:?}");
        stage
    }

    fn handle(&mut self, what: &'static str, input: Input) -> Vec<Output> {
        self.now += SECOND / 10_000;
        let (mut out, begun) = (Vec::new(), Instant::now());
        self.engine.handle(input, self.now, &mut out);
        let longest = self.longest.entry(what).or_default();
        *longest = begun.elapsed().max(*longest);
        out
    }

    fn ask(&mut self, what: &'static str, request: LocalRequest) -> Vec<LocalEvent> {
        let out = self.handle(what, Input::Local { client: CLIENT, request });
        let event = |output| if let Output::Local { event, .. } = output { Some(event) } else { None };
        out.into_iter().filter_map(event).collect()
    }

    fn tag(&mut self) -> Tag {
        self.requests += 1;
        Tag { request: self.requests, attempt: 0, worker: 1 }
    }

    /// Publishes a prompt. What is in the blocks is nobody's business here.
    fn publish(&mut self, prompt: u64) {
        let (tag, keys) = (self.tag(), prompt_keys(prompt));
        let (parent, mode) = (BlockKey([0; 16]), GrantMode::Wait);
        let told =
            self.ask("grant", LocalRequest::Grant { tag, keys, private: 0, parent, position: 0, mode, tenant: 0 });
        assert!(matches!(told[..], [LocalEvent::Granted { .. }]), "{told:?}");
        self.ask("commit", LocalRequest::Commit { tag, indices: (0..PROMPT as u32).collect() });
        self.ask("end", LocalRequest::End { tag });
    }

    /// How many leading blocks of a prompt are in DRAM.
    fn find(&mut self, prompt: u64) -> usize {
        let tag = self.tag();
        let told = self.ask("lookup", LocalRequest::Lookup { tag, keys: prompt_keys(prompt) });
        self.ask("end", LocalRequest::End { tag });
        match &told[..] {
            [LocalEvent::Located { slots, .. }] => slots.len(),
            other => panic!("{other:?}"),
        }
    }

    /// All that a dump tells: how often each block is on this medium.
    fn dump(&mut self, medium: Medium) -> Vec<u8> {
        let mut seen = vec![0; blocks() as usize];
        let mut next_part = 0;
        let mut out = self.handle("dump", Input::Order(DaemonOrder::Dump));
        loop {
            let mut ended = false;
            for output in out {
                let Output::Report(DaemonReport::Dump { part, blocks, last, .. }) = output else { continue };
                assert!(part == next_part && blocks.len() <= 1024 && !ended, "part {part}");
                (next_part, ended) = (part + 1, last);
                for (key, _, _, _) in blocks.iter().filter(|(.., on)| *on == medium) {
                    seen[number(key) as usize] += 1;
                }
            }
            assert_eq!(self.engine.is_dumping(), !ended);
            if ended {
                return seen;
            }
            // As a daemon does between two parts.
            self.handle("tick", Input::Tick);
            out = self.handle("dump on", Input::DumpOn);
        }
    }

    /// All that `transferd keys` lists.
    fn list(&mut self, medium: Medium) -> Vec<u8> {
        let (mut seen, mut from) = (vec![0; blocks() as usize], Some(Cursor::default()));
        while let Some(at) = from {
            let begun = Instant::now();
            let (listed, next) = self.engine.keys(at, &Prefix::default(), Some(medium));
            let longest = self.longest.entry("keys").or_default();
            *longest = begun.elapsed().max(*longest);
            assert!(listed.len() <= 4096, "a stretch");
            listed.iter().for_each(|listed| seen[number(&listed.key) as usize] += 1);
            from = next;
        }
        seen
    }

    fn say(&self, what: &str, grown: f64) {
        println!("{what}: {} blocks, {:.0} bytes of memory each", blocks(), grown / blocks() as f64);
        for (what, longest) in &self.longest {
            println!("    longest {what:8} {:.3} ms", longest.as_secs_f64() * 1e3);
        }
    }
}

fn prompt_keys(prompt: u64) -> Vec<BlockKey> {
    (prompt * PROMPT..(prompt + 1) * PROMPT).map(key).collect()
}

/// Bytes of this process that lie in memory.
fn resident() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux has it");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("Linux says it");
    line.trim_end_matches("kB").trim().parse::<f64>().expect("a number of kB") * 1024.0
}

fn node() -> NodeAddress {
    NodeAddress { node: "n".into(), address: String::new(), incarnation: 1 }
}

fn memory_for(slots: u64) -> u64 {
    slots * slot_bytes(LAYOUT).expect("possible") + 4096
}

#[test]
fn in_dram() {
    let before = resident();
    let mut stage = Stage::new(Engine::new(node(), Settings::new(memory_for(blocks() + PROMPT))));
    let prompts = blocks() / PROMPT;
    (0..prompts).for_each(|prompt| stage.publish(prompt));
    let grown = resident() - before;
    let seen = stage.dump(Medium::Dram);
    assert!(seen.iter().all(|times| *times == 1), "a dump has each block once");
    assert_eq!(stage.list(Medium::Dram), seen);
    let (begun, mut random) = (Instant::now(), Random(1));
    let lookups = prompts.min(20_000);
    for _ in 0..lookups {
        assert_eq!(stage.find(random.below(prompts)), PROMPT as usize);
    }
    let rate = (lookups * PROMPT) as f64 / begun.elapsed().as_secs_f64();
    stage.say("dram", grown);
    println!("    lookups  {:.2} M blocks/s, in messages of {PROMPT}, with their release", rate / 1e6);
    // The books, and what the arena has for each slot. Beyond both, nothing may grow with the blocks.
    let most = 200.0 * blocks() as f64 + f64::from(32 << 20);
    assert!(grown < most, "{grown} bytes for {} blocks", blocks());
}

/// A disk that says yes and keeps nothing but the lengths of its files.
#[derive(Default)]
struct Nowhere(Mutex<BTreeMap<FileId, u64>>);

impl Disk for Nowhere {
    fn list(&self) -> io::Result<Vec<(FileId, u64)>> {
        Ok(Vec::new())
    }

    fn allocate(&self, file: FileId, bytes: u64) -> io::Result<()> {
        self.0.lock().expect("nobody panics").insert(file, bytes);
        Ok(())
    }

    fn remove(&self, file: FileId) -> io::Result<()> {
        self.0.lock().expect("nobody panics").remove(&file);
        Ok(())
    }

    fn read(&self, _: FileId, _: u64, into: &mut [u8]) -> io::Result<()> {
        into.fill(0);
        Ok(())
    }

    fn write(&self, _: FileId, _: u64, _: &mut [IoSlice<'_>]) -> io::Result<()> {
        Ok(())
    }

    fn sync(&self, _: FileId) -> io::Result<()> {
        Ok(())
    }

    fn store(&self) -> u64 {
        1
    }

    fn name(&self) -> String {
        "nowhere".into()
    }
}

#[test]
fn on_ssd() {
    let before = resident();
    // Twice what the blocks take: nothing is to be reclaimed.
    let limit = blocks() * 2 * 4096 + (64 << 20);
    let disk: Arc<dyn Disk> = Arc::new(Nowhere::default());
    let ssd = Ssd::over(vec![disk], limit, 0, 1, || {}).expect("there is nothing to be read");
    let slots = 1024;
    let mut stage = Stage::new(Engine::with_tier(node(), Settings::new(memory_for(slots)), Box::new(ssd)));
    for prompt in 0..blocks() / PROMPT {
        stage.publish(prompt);
        // The disk is as quick as it is asked.
        for _ in 0..4 {
            stage.handle("tier", Input::Tier);
        }
    }
    let grown = resident() - before;
    let seen = stage.dump(Medium::Ssd);
    let missing = seen.iter().filter(|times| **times == 0).count() as u64;
    assert!(seen.iter().all(|times| *times <= 1), "a dump has each block once");
    assert!(missing <= slots, "{missing} were neither in DRAM nor on the SSD");
    assert_eq!(stage.list(Medium::Ssd), seen);
    stage.say("ssd", grown);
    let most = 160.0 * blocks() as f64 + f64::from(64 << 20);
    assert!(grown < most, "{grown} bytes for {} blocks", blocks());
}
