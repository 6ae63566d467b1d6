//! Goal: lanes carry any bytes between any registered memory, both ways, exactly, over tcp and over shm, with checksums and
//! without; what a peer may not touch it does not, and a peer that lies, stalls or dies harms nobody. Method: two engines'
//! transports in this process, random copies compared with a model in plain vectors; raw sockets play the bad peer.

mod buffers;
mod lanes;

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use pyengine_transfer::link::{Connection, Link, Stream, nonce, now};
use pyengine_transfer::region::{Access, Buffer, Regions};
use pyengine_transfer::session::{Event, Session};
use pyengine_transfer::transport::fence::next_path;
use pyengine_transfer::transport::lanes::{Counters, LaneTransport, Settings, frames};
use pyengine_transfer::transport::shm::ShmTransport;
use pyengine_transfer::transport::{Completion, Copy, CopyId, Op, Outcome, Path, Transport};
use pyengine_transfer::types::{NodeAddress, RegionId, Span};

use buffers::{content, fill};
use lanes::PATIENCE;

const ALL: Access = Access { read: true, write: true };
const BYTES: usize = 3 << 20;

/// What kind of memory an end registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Memory {
    Private,
    Mappable,
}

fn buffer(memory: Memory, bytes: usize, access: Access) -> Arc<Buffer> {
    Arc::new(match memory {
        Memory::Private => Buffer::owned(bytes, access),
        Memory::Mappable => Buffer::shared(bytes as u64, access).expect("memory"),
    })
}

fn noise(seed: u64, bytes: usize) -> Vec<u8> {
    let mut state = seed | 1;
    (0..bytes)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 32) as u8
        })
        .collect()
}

/// One end, with what keeps it reachable.
enum End {
    Tcp(LaneTransport),
    Shm(ShmTransport),
}

impl End {
    fn transport(&mut self) -> &mut dyn Transport {
        match self {
            Self::Tcp(transport) => transport,
            Self::Shm(transport) => transport,
        }
    }

    fn counters(&self) -> Counters {
        match self {
            Self::Tcp(transport) => transport.counters(),
            Self::Shm(transport) => transport.counters(),
        }
    }
}

struct Pair {
    end: End,
    woken: mpsc::Receiver<()>,
    peer: NodeAddress,
    mine: Arc<Regions>,
    theirs: Arc<Regions>,
    outcomes: HashMap<CopyId, Outcome>,
    /// Both keep the peer alive.
    receiver: Option<lanes::Receiver>,
    other: Option<ShmTransport>,
}

impl Pair {
    fn tcp(settings: Settings) -> Self {
        let (mine, theirs) = (Regions::new(), Regions::new());
        let receiver = lanes::Receiver::with(theirs.clone());
        let (transport, woken) = lanes::sender_with(mine.clone(), settings);
        let peer = receiver.address.clone();
        Self::joined(End::Tcp(transport), woken, peer, (mine, theirs), Some(receiver), None)
    }

    fn shm(settings: Settings) -> Self {
        let (mine, theirs) = (Regions::new(), Regions::new());
        let (peer, other, _) = lanes::shm_with("destination", theirs.clone(), Settings::default());
        let (_, transport, woken) = lanes::shm_with("source", mine.clone(), settings);
        Self::joined(End::Shm(transport), woken, peer, (mine, theirs), None, Some(other))
    }

    fn joined(
        mut end: End,
        woken: mpsc::Receiver<()>,
        peer: NodeAddress,
        (mine, theirs): (Arc<Regions>, Arc<Regions>),
        receiver: Option<lanes::Receiver>,
        other: Option<ShmTransport>,
    ) -> Self {
        end.transport().connect(&peer);
        Self { end, woken, peer, mine, theirs, outcomes: HashMap::new(), receiver, other }
    }

    fn submit(&mut self, copies: &[Copy]) {
        let peer = self.peer.node.clone();
        self.end.transport().submit(&peer, copies).expect("an empty queue takes any number");
    }

    /// Waits for so many outcomes in all.
    fn wait(&mut self, count: usize) {
        loop {
            let mut completions = Vec::new();
            self.end.transport().poll(&mut completions);
            for Completion { id, outcome } in completions {
                assert!(self.outcomes.insert(id, outcome).is_none(), "copy {id} completes twice");
            }
            if self.outcomes.len() >= count {
                return;
            }
            self.woken.recv_timeout(PATIENCE).expect("every copy completes");
        }
    }

    fn one(&mut self, copy: Copy) -> Outcome {
        self.submit(&[copy]);
        self.wait(self.outcomes.len() + 1);
        self.outcomes[&copy.id]
    }
}

fn span(region: RegionId, offset: usize) -> Span {
    Span { region, life: 0, offset: offset as u64 }
}

fn settings(checksums: bool) -> Settings {
    Settings { checksums, ..Settings::default() }
}

fn pairs() -> impl Iterator<Item = (&'static str, Pair, Memory, Memory)> {
    use Memory::{Mappable, Private};
    let kinds = [(Private, Private), (Private, Mappable), (Mappable, Private), (Mappable, Mappable)];
    let tcp = [true, false].map(|sums| ("tcp", Pair::tcp(settings(sums)), Private, Private));
    let shm = kinds
        .into_iter()
        .flat_map(|(mine, theirs)| [true, false].map(|sums| ("shm", Pair::shm(settings(sums)), mine, theirs)));
    tcp.into_iter().chain(shm)
}

#[test]
fn random_copies_are_exact_both_ways() {
    for (index, (name, mut pair, mine, theirs)) in pairs().enumerate() {
        let (near, far) = (buffer(mine, BYTES, ALL), buffer(theirs, BYTES, ALL));
        let (mut near_model, mut far_model) = (noise(index as u64 + 1, BYTES), noise(index as u64 + 100, BYTES));
        fill(&near, &near_model);
        fill(&far, &far_model);
        let (near_id, far_id) = (pair.mine.add(near.clone()), pair.theirs.add(far.clone()));
        let dice = noise(index as u64 + 7, 1 << 16);
        let mut dice =
            dice.chunks_exact(4).map(|four| u32::from_le_bytes([four[0], four[1], four[2], four[3]]) as usize);
        let mut roll = |below: usize| dice.next().expect("enough") % below;
        let (mut id, mut total) = (0, 0);
        // Copies of one batch touch different bytes (each its own window), so their order does not matter.
        for batch in 0..12 {
            let count = [1, 3, 600, 40][batch % 4];
            let window = BYTES / count;
            let op = if batch % 3 == 1 { Op::Read } else { Op::Write };
            let mut copies = Vec::new();
            for number in 0..count {
                let bytes = roll(window.min(256 << 10) + 1);
                let (from, to) =
                    (number * window + roll(window - bytes + 1), number * window + roll(window - bytes + 1));
                let grain = [0, 4096, 64, 100_000][roll(4)];
                id += 1;
                let (local, remote) = (span(near_id, from), span(far_id, to));
                copies.push(Copy { id, op, local, remote, bytes: bytes as u32, grain });
                match op {
                    Op::Write => far_model[to..to + bytes].copy_from_slice(&near_model[from..from + bytes]),
                    Op::Read => near_model[from..from + bytes].copy_from_slice(&far_model[to..to + bytes]),
                }
            }
            total += count;
            pair.submit(&copies);
            pair.wait(total);
            assert!(pair.outcomes.values().all(|outcome| *outcome == Outcome::Done), "{name} {mine:?} {theirs:?}");
            assert!(
                content(&near) == near_model && content(&far) == far_model,
                "{name} batch {batch} {mine:?} {theirs:?}"
            );
        }
        let counters = pair.end.counters();
        assert_eq!((counters.copies_out, counters.corrupt), (total as u64, 0));
        assert!(counters.frames_out < total as u64, "small copies share frames");
        for (regions, id) in [(&pair.mine, near_id), (&pair.theirs, far_id)] {
            assert!(regions.remove(id).expect("registered").wait_quiet(PATIENCE), "{name}: nobody holds it any more");
        }
    }
}

#[test]
fn a_peer_touches_only_what_it_may() {
    for (name, mut pair, mine, theirs) in pairs() {
        let (near, far) = (buffer(mine, 8192, ALL), buffer(theirs, 8192, Access { read: true, write: false }));
        let (near_id, far_id) = (pair.mine.add(near.clone()), pair.theirs.add(far.clone()));
        let secret = buffer(theirs, 8192, Access { read: false, write: true });
        let secret_id = pair.theirs.add(secret);
        fill(&near, &[1; 8192]);
        fill(&far, &[2; 8192]);
        let copy = |id, op, region, offset, bytes| Copy {
            id,
            op,
            local: span(near_id, 0),
            remote: span(region, offset),
            bytes,
            grain: 0,
        };
        let cases = [
            (copy(1, Op::Write, far_id, 0, 100), Outcome::Denied),
            (copy(2, Op::Read, far_id, 8100, 100), Outcome::Denied),
            (copy(3, Op::Read, far_id, usize::MAX - 50, 100), Outcome::Denied),
            (copy(4, Op::Read, secret_id, 0, 100), Outcome::Denied),
            (copy(5, Op::Write, RegionId(77), 0, 100), Outcome::Fenced),
            (copy(6, Op::Read, RegionId(77), 0, 100), Outcome::Fenced),
            (Copy { local: span(near_id, 8100), ..copy(7, Op::Read, far_id, 0, 100) }, Outcome::Denied),
            (Copy { local: span(RegionId(99), 0), ..copy(8, Op::Write, secret_id, 0, 100) }, Outcome::Fenced),
        ];
        for (copy, expected) in cases {
            assert_eq!(pair.one(copy), expected, "{name}: {copy:?}");
        }
        // In one frame with good ones: only the bad ones are refused.
        let good = Copy { local: span(near_id, 200), ..copy(21, Op::Read, far_id, 0, 100) };
        pair.submit(&[copy(20, Op::Read, RegionId(77), 0, 50), good, copy(22, Op::Read, secret_id, 0, 7)]);
        pair.wait(11);
        let said = [20, 21, 22].map(|id| pair.outcomes[&id]);
        assert_eq!(said, [Outcome::Fenced, Outcome::Done, Outcome::Denied], "{name}");
        let mut expected = vec![1; 8192];
        expected[200..300].fill(2);
        assert!(content(&near) == expected && content(&far) == [2; 8192], "{name}");
        // Written copies likewise, refused bodies in between.
        let write =
            |id, region, offset| Copy { local: span(near_id, 200), ..copy(id, Op::Write, region, offset, 1000) };
        pair.submit(&[
            write(30, secret_id, 0),
            write(31, far_id, 0),
            write(32, secret_id, 1000),
            write(33, RegionId(7), 0),
        ]);
        pair.wait(15);
        let said = [30, 31, 32, 33].map(|id| pair.outcomes[&id]);
        assert_eq!(said, [Outcome::Done, Outcome::Denied, Outcome::Done, Outcome::Fenced], "{name}");
        assert_eq!(pair.end.counters().lanes_out, 1, "{name}: the lane goes on");
    }
}

#[test]
fn a_region_that_is_gone_is_fenced_and_a_new_one_works() {
    for (name, mut pair, mine, theirs) in pairs() {
        for round in 0..5 {
            let (near, far) = (buffer(mine, 4096, ALL), buffer(theirs, 4096, ALL));
            let (near_id, far_id) = (pair.mine.add(near.clone()), pair.theirs.add(far.clone()));
            fill(&near, &[round as u8 + 1; 4096]);
            let copy = |id| {
                let (local, remote) = (span(near_id, 0), span(far_id, 0));
                Copy { id, op: Op::Write, local, remote, bytes: 4096, grain: 0 }
            };
            assert_eq!(pair.one(copy(10 * round + 1)), Outcome::Done, "{name}");
            assert_eq!(content(&far), vec![round as u8 + 1; 4096], "{name}");
            assert!(pair.theirs.remove(far_id).expect("registered").wait_quiet(PATIENCE));
            assert_eq!(pair.one(copy(10 * round + 2)), Outcome::Fenced, "{name}");
            assert!(pair.mine.remove(near_id).expect("registered").wait_quiet(PATIENCE));
            assert_eq!(pair.one(copy(10 * round + 3)), Outcome::Fenced, "{name}");
            assert_eq!(content(&far), vec![round as u8 + 1; 4096], "{name}");
        }
    }
}

#[test]
fn a_connection_that_died_idle_is_replaced_without_anybody_noticing() {
    let mut pair = Pair::tcp(Settings::default());
    let (near, far) = (buffer(Memory::Private, 4096, ALL), buffer(Memory::Private, 4096, ALL));
    let (near_id, far_id) = (pair.mine.add(near), pair.theirs.add(far));
    for round in 0..3 {
        let copy =
            Copy { id: round, op: Op::Write, local: span(near_id, 0), remote: span(far_id, 0), bytes: 4096, grain: 0 };
        assert_eq!(pair.one(copy), Outcome::Done, "round {round}");
        pair.receiver.as_ref().expect("tcp").close_lanes("source");
        let until = Instant::now() + PATIENCE;
        while pair.end.counters().lanes_out > 0 {
            assert!(Instant::now() < until, "the end of the lane is seen");
            std::thread::yield_now();
        }
        assert_eq!(pair.end.transport().path(&"destination".to_owned()), Path::Up);
    }
}

#[test]
fn a_dead_peer_ends_what_is_under_way_and_says_so() {
    for (name, mut pair, mine, theirs) in pairs() {
        let (near, far) = (buffer(mine, BYTES, ALL), buffer(theirs, BYTES, ALL));
        let (near_id, far_id) = (pair.mine.add(near), pair.theirs.add(far));
        let copies: Vec<Copy> = (0..3000)
            .map(|id| {
                let op = if id % 2 == 0 { Op::Write } else { Op::Read };
                let at = (id as usize * 4096) % (BYTES - 65536);
                Copy { id, op, local: span(near_id, at), remote: span(far_id, at), bytes: 65536, grain: 0 }
            })
            .collect();
        pair.submit(&copies);
        pair.wait(1);
        pair.receiver = None;
        pair.other = None;
        pair.wait(copies.len());
        assert!(pair.outcomes.values().all(|outcome| matches!(outcome, Outcome::Done | Outcome::Lost)), "{name}");
        let until = Instant::now() + PATIENCE;
        while !matches!(pair.end.transport().path(&"destination".to_owned()), Path::Down(_)) {
            let copy = Copy { id: 10_000 + pair.outcomes.len() as u64, ..copies[0] };
            assert_eq!(pair.one(copy), Outcome::Lost, "{name}");
            assert!(Instant::now() < until, "{name}: {:?}", pair.end.transport().path(&"destination".to_owned()));
        }
        for (regions, id) in [(&pair.mine, near_id), (&pair.theirs, far_id)] {
            assert!(regions.remove(id).expect("registered").wait_quiet(PATIENCE), "{name}: nobody holds it any more");
        }
    }
}

#[test]
fn a_stranger_host_has_no_shm_path() {
    let mut pair = Pair::shm(Settings::default());
    let elsewhere = NodeAddress { node: "elsewhere".into(), address: "192.0.2.1:1".into(), incarnation: 1 };
    pair.end.transport().connect(&elsewhere);
    let until = Instant::now() + PATIENCE;
    while !matches!(pair.end.transport().path(&"elsewhere".to_owned()), Path::Down(reason) if reason.contains("not on this host"))
    {
        assert!(Instant::now() < until);
        std::thread::yield_now();
    }
}

fn write_frame(region: RegionId, bytes: u32) -> Vec<u8> {
    let mut table = Vec::new();
    frames::put_entry(&mut table, &frames::Entry { at: span(region, 0), bytes, grain: 0 });
    frames::encode(frames::Kind::Write, frames::Flags::BARE, 1, 1, bytes.into(), &table)
}

#[test]
fn lies_and_trickles_end_a_lane_and_give_back_what_it_held() {
    let theirs = Regions::new();
    let far = buffer(Memory::Private, 1 << 20, ALL);
    let far_id = theirs.add(far);
    let receiver = lanes::Receiver::with(theirs.clone());
    let ended = |mut stream: TcpStream| {
        let mut rest = Vec::new();
        // An end or a reset; only silence would be wrong.
        let result = stream.read_to_end(&mut rest);
        assert!(!matches!(&result, Err(error) if error.kind() == std::io::ErrorKind::WouldBlock), "{result:?}");
    };
    let mut lie = write_frame(far_id, 100);
    lie[24] ^= 1;
    let shared = frames::encode(frames::Kind::Release, frames::Flags::SHARED, 1, 9, 0, &[]);
    for bad in [b"GET / HTTP/1.1\r\nHost: an engine, I hope\r\n\r\n".to_vec(), lie, shared, vec![0; 4096]] {
        let mut stream = lanes::raw_lane(&receiver.address, next_path());
        stream.write_all(&bad).expect("connected");
        ended(stream);
    }
    // One sends a header byte by byte, one stops within a body that it holds memory for.
    let mut slow = lanes::raw_lane(&receiver.address, next_path());
    let mut stuck = lanes::raw_lane(&receiver.address, next_path());
    stuck.write_all(&write_frame(far_id, 1000)).expect("connected");
    stuck.write_all(&[1; 10]).expect("connected");
    let frame = write_frame(far_id, 100);
    let trickle = std::thread::spawn(move || {
        let started = Instant::now();
        let mut sent = 0;
        slow.set_read_timeout(Some(Duration::from_millis(400))).expect("a socket");
        loop {
            let mut byte = [0];
            match slow.read(&mut byte) {
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                _ => return sent,
            }
            assert!(started.elapsed() < PATIENCE && sent < frame.len(), "a trickling lane is closed");
            if slow.write_all(&frame[sent..=sent]).is_err() {
                return sent;
            }
            sent += 1;
        }
    });
    ended(stuck);
    let sent = trickle.join().expect("no panic");
    assert!((1..60).contains(&sent), "{sent} bytes of a header were waited for");
    assert!(theirs.remove(far_id).expect("registered").wait_quiet(PATIENCE), "the stuck lane holds nothing");
}

#[test]
fn a_thread_that_waits_takes_the_answer_itself() {
    for (name, mut pair, mine, theirs) in pairs() {
        let (near, far) = (buffer(mine, 4096, ALL), buffer(theirs, 4096, ALL));
        let (near_id, far_id) = (pair.mine.add(near), pair.theirs.add(far));
        let copy = |id| {
            let (local, remote) = (span(near_id, 0), span(far_id, 0));
            Copy { id, op: if id % 2 == 0 { Op::Write } else { Op::Read }, local, remote, bytes: 4096, grain: 0 }
        };
        assert_eq!(pair.one(copy(0)), Outcome::Done, "{name}: the path stands");
        let peer = pair.peer.node.clone();
        let mut helped = 0;
        for id in 1..200 {
            // Taken over before it is submitted, or when the answer is under way already.
            let helper = pair.end.transport().helper(&peer).expect("lanes have one");
            let early = if id % 3 == 0 { helper.take_next() } else { None };
            pair.submit(&[copy(id)]);
            if let Some(mut hand) = early.or_else(|| helper.take_over())
                && hand.wait(PATIENCE)
            {
                helped += 1;
                let mut completions = Vec::new();
                pair.end.transport().poll(&mut completions);
                pair.outcomes.extend(completions.iter().map(|completion| (completion.id, completion.outcome)));
            }
            pair.wait(id as usize + 1);
            assert_eq!(pair.outcomes[&id], Outcome::Done);
        }
        assert!(helped > 40, "{name}: {helped} answers were taken by who waited for them");
        let helper = pair.end.transport().helper(&peer).expect("lanes have one");
        assert!(helper.take_over().is_none(), "{name}: nothing is under way");
        let mut hand = helper.take_next().expect("an idle lane");
        assert!(helper.take_next().is_none(), "{name}: two work on one lane");
        assert!(!hand.wait(Duration::from_millis(1)), "nothing is under way");
        drop(hand);
        // Whoever took it over has given it back: the lane's own thread takes the answer.
        pair.submit(&[copy(200)]);
        pair.wait(201);
        assert_eq!(pair.outcomes[&200], Outcome::Done, "{name}: its thread watches it no more");
    }
}

#[test]
fn hundreds_of_small_frames_under_way_at_once_all_end() {
    for (name, mut pair, mine, theirs) in pairs() {
        let (near, far) = (buffer(mine, 65536, ALL), buffer(theirs, 65536, ALL));
        fill(&far, &noise(5, 65536));
        let (near_id, far_id) = (pair.mine.add(near.clone()), pair.theirs.add(far.clone()));
        // One by one, so that each is sent at once in a frame of its own until the window is full.
        for id in 0..2000 {
            let at = (id as usize * 32) % 65536;
            pair.submit(&[Copy {
                id,
                op: Op::Read,
                local: span(near_id, at),
                remote: span(far_id, at),
                bytes: 32,
                grain: 0,
            }]);
        }
        pair.wait(2000);
        assert!(pair.outcomes.values().all(|outcome| *outcome == Outcome::Done), "{name}");
        assert!(content(&near)[..64000] == content(&far)[..64000], "{name}");
    }
}

#[test]
fn a_target_that_never_answers_is_given_up_after_three_seconds() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("binds");
    let peer = NodeAddress {
        node: "destination".into(),
        address: listener.local_addr().expect("bound").to_string(),
        incarnation: 1,
    };
    let me = peer.clone();
    let (keep, kept) = mpsc::channel();
    let accepting = std::thread::spawn(move || {
        let (stream, _) = listener.accept().expect("dialled");
        let session = Session::accept(lanes::KEY, me, nonce().expect("random"), now());
        let link = Link::new().expect("an eventfd");
        let mut connection = Connection::new(Stream::Tcp(stream), session, link).expect("a socket");
        assert!(matches!(connection.handshake(), Ok(Event::Proven(_))));
        connection.welcome();
        keep.send(connection.into_lane().expect("fresh")).expect("the test lives");
    });
    let regions = Regions::new();
    let near = regions.add(buffer(Memory::Private, 4096, ALL));
    let (mut transport, woken) = lanes::sender_with(regions.clone(), Settings::default());
    transport.connect(&peer);
    let copy = |id, op| Copy { id, op, local: span(near, 0), remote: span(RegionId(1), 0), bytes: 4096, grain: 0 };
    transport.submit(&peer.node, &[copy(1, Op::Write), copy(2, Op::Read)]).expect("empty");
    let mut completions = Vec::new();
    while completions.len() < 2 {
        woken.recv_timeout(PATIENCE).expect("both end");
        transport.poll(&mut completions);
    }
    assert!(completions.iter().all(|completion| completion.outcome == Outcome::Lost));
    let path = transport.path(&peer.node);
    assert!(matches!(&path, Path::Down(reason) if reason.contains("3 s")), "{path:?}");
    assert!(regions.remove(near).expect("registered").wait_quiet(PATIENCE));
    accepting.join().expect("no panic");
    drop(kept);
}

#[test]
fn lanes_stand_over_ipv6_and_one_too_many_is_refused() {
    let theirs = Regions::new();
    let receiver =
        lanes::Receiver::at("[::1]:0", theirs.clone(), Settings { incoming_lanes: 1, ..Settings::default() });
    let far = theirs.add(buffer(Memory::Private, 4096, ALL));
    let mut ends: Vec<_> = (0..2)
        .map(|_| {
            let mine = Regions::new();
            assert_eq!(mine.add(buffer(Memory::Private, 4096, ALL)), far);
            let (mut transport, woken) = lanes::sender_with(mine, Settings::default());
            transport.connect(&receiver.address);
            (transport, woken)
        })
        .collect();
    // Which of them is the first is not said; one gets in, and the other one's lane ends.
    let until = Instant::now() + PATIENCE;
    let node = receiver.address.node.clone();
    let copy = Copy { id: 1, op: Op::Read, local: span(far, 0), remote: span(far, 0), bytes: 0, grain: 0 };
    let mut outcomes = Vec::new();
    for (transport, woken) in &mut ends {
        transport.submit(&node, &[copy]).expect("empty");
        let mut completions = Vec::new();
        while completions.is_empty() {
            assert!(Instant::now() < until);
            woken.recv_timeout(PATIENCE).expect("it ends");
            transport.poll(&mut completions);
        }
        outcomes.push(completions[0].outcome);
    }
    outcomes.sort_by_key(|outcome| *outcome == Outcome::Lost);
    assert_eq!(outcomes, [Outcome::Done, Outcome::Lost]);
}
