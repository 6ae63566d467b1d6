//! What the machine gives with no protocol at all: the limit that the transfer engine is measured against.
//!
//! ```text
//! bare tcp    --op write --block 1MiB --batch 64 --streams 2 --buffer 256KiB   bytes between two processes over sockets
//! bare ping   --block 4KiB                                                     a block there, one byte back
//! bare memcpy --block 64KiB --batch 512 --streams 2                            from memory to memory, in one process
//! bare pull   --block 64KiB --batch 512 --streams 2                            process_vm_readv from another process
//! ```
//!
//! Each prints one JSON object. A batch is scattered: block `i` of the one side is block `shuffled[i]` of the other, as
//! the blocks of a KV cache are. Every batch takes the next set of a pool of buffers that is far larger than a core's own
//! caches, so neither end is warm. A batch ends when all of it is in the memory of the receiver and
//! (write) one byte per stream has come back to say so; then the next begins. Streams are threads, one at each end.

use std::io::{self, BufRead, BufReader, IoSlice, IoSliceMut, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use clap::{Parser, ValueEnum};
use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap_anonymous};
use nix::sys::socket::{setsockopt, sockopt};
use nix::sys::uio::{RemoteIoVec, process_vm_readv};
use nix::unistd::Pid;
use transfer::config::parse_bytes;

/// Bytes of all sets together, at each end: as the contenders have (`bench/peers/driver.py`).
const POOL_BYTES: usize = 128 << 20;
/// Most blocks that one system call may name (UIO_MAXIOV).
const MOST_BLOCKS: usize = 1024;

/// The limit: the same bytes, moved with no protocol.
#[derive(Parser, Clone, Debug)]
struct Arguments {
    /// What to do
    what: What,
    /// Which way, seen from the process that measures
    #[arg(long, default_value = "write")]
    op: Op,
    /// Bytes of a block
    #[arg(long, default_value = "1MiB", value_parser = size)]
    block: usize,
    /// Blocks of a batch
    #[arg(long, default_value_t = 64)]
    batch: usize,
    /// Connections, with a thread at each end (memcpy, pull: threads)
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=64))]
    streams: u8,
    /// Bytes of each kernel buffer; 0: as the kernel tunes them
    #[arg(long, default_value = "0", value_parser = size)]
    buffer: usize,
    /// Most bytes handed to the kernel in one call
    #[arg(long, default_value = "256KiB", value_parser = size)]
    call: usize,
    /// Memory that processes share (small pages, unless the system gives huge ones to shared memory), not private
    #[arg(long)]
    shared: bool,
    /// How long
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
    /// For the child: where the parent listens
    #[arg(long, hide = true, default_value = "")]
    port: String,
}

#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
enum What {
    Tcp,
    Ping,
    Memcpy,
    Pull,
    #[value(hide = true)]
    Target,
    #[value(hide = true)]
    Memory,
}

#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
enum Op {
    Write,
    Read,
}

fn size(text: &str) -> Result<usize, String> {
    parse_bytes(text).map(|bytes| bytes as usize).map_err(|error| error.to_string())
}

fn main() -> io::Result<()> {
    let arguments = Arguments::parse();
    match arguments.what {
        What::Tcp => tcp(&arguments),
        What::Ping => ping(&arguments),
        What::Memcpy => memcpy(&arguments),
        What::Pull => pull(&arguments),
        What::Target => target(&arguments),
        What::Memory => memory(&arguments),
    }
}

fn tcp(arguments: &Arguments) -> io::Result<()> {
    let mut pool = Pool::new(arguments);
    let sets = pool.sets;
    let parts = pool.parts(usize::from(arguments.streams), false);
    let (child, sockets) = connect(arguments, usize::from(arguments.streams))?;
    let work = parts.into_iter().zip(sockets).map(|(mut sets, mut socket)| {
        move |set: usize| match arguments.op {
            Op::Write => {
                send(&socket, &sets[set], arguments.call)?;
                socket.read_exact(&mut [0])
            }
            Op::Read => {
                socket.write_all(&[1])?;
                receive(&socket, &mut sets[set], arguments.call)
            }
        }
    });
    let measured = measure(arguments, sets, work.collect())?;
    report(arguments, &measured, child.end()?)
}

fn ping(arguments: &Arguments) -> io::Result<()> {
    let arguments = &Arguments { batch: 1, streams: 1, op: Op::Write, ..arguments.clone() };
    tcp(arguments)
}

fn memcpy(arguments: &Arguments) -> io::Result<()> {
    let (mut source, mut destination) = (Pool::new(arguments), Pool::new(arguments));
    let sets = source.sets;
    let pairs = source
        .parts(usize::from(arguments.streams), false)
        .into_iter()
        .zip(destination.parts(usize::from(arguments.streams), true));
    let work = pairs.map(|(from, mut to)| {
        move |set: usize| {
            for (from, to) in from[set].iter().zip(&mut to[set]) {
                to.copy_from_slice(from);
            }
            Ok(())
        }
    });
    let measured = measure(arguments, sets, work.collect())?;
    report(arguments, &measured, Cpu::default())
}

fn pull(arguments: &Arguments) -> io::Result<()> {
    let mut child = Other::start("memory", arguments, "")?;
    let base: usize = child.line()?.parse().map_err(io::Error::other)?;
    let pid = Pid::from_raw(child.process.id() as i32);
    let mut pool = Pool::new(arguments);
    let (sets, order, bytes) = (pool.sets, order(arguments.batch), arguments.block);
    let order = &order;
    let work = pool.parts(usize::from(arguments.streams), false).into_iter().enumerate().map(|(stream, mut parts)| {
        move |set: usize| {
            let blocks = (stream..arguments.batch).step_by(usize::from(arguments.streams));
            let from: Vec<_> = blocks
                .map(|block| RemoteIoVec { base: base + (set * arguments.batch + order[block]) * bytes, len: bytes })
                .collect();
            let per_call = (arguments.call / bytes).clamp(1, MOST_BLOCKS);
            for (from, to) in from.chunks(per_call).zip(parts[set].chunks_mut(per_call)) {
                let mut to: Vec<_> = to.iter_mut().map(|block| IoSliceMut::new(block)).collect();
                let done = process_vm_readv(pid, &mut to, from)?;
                assert_eq!(done, from.len() * bytes, "the other process ended");
            }
            Ok(())
        }
    });
    let measured = measure(arguments, sets, work.collect())?;
    report(arguments, &measured, child.end()?)
}

/// The other process of `tcp`: takes what is written and says so, or sends what is asked for.
fn target(arguments: &Arguments) -> io::Result<()> {
    let mut pool = Pool::new(arguments);
    let parts = pool.parts(usize::from(arguments.streams), true);
    std::thread::scope(|scope| {
        let serve = |(stream, part)| move || serve(arguments, stream as u8, part);
        let threads: Vec<_> = parts.into_iter().enumerate().map(|part| scope.spawn(serve(part))).collect();
        // The pools are filled: what is used from here on counts.
        let before = cpu_seconds()?;
        for thread in threads {
            thread.join().expect("no panic")?;
        }
        let Cpu { user, system } = cpu_seconds()?.since(before);
        println!("{user} {system}");
        Ok(())
    })
}

/// One stream of the target, until the other side hangs up.
fn serve(arguments: &Arguments, stream: u8, mut sets: Vec<Vec<&mut [u8]>>) -> io::Result<()> {
    let mut socket = TcpStream::connect(&arguments.port)?;
    tune(&socket, arguments.buffer)?;
    socket.write_all(&[stream])?;
    loop {
        for set in &mut sets {
            match arguments.op {
                Op::Write => {
                    if receive(&socket, set, arguments.call).is_err() {
                        return Ok(());
                    }
                    socket.write_all(&[1])?;
                }
                Op::Read => {
                    if socket.read_exact(&mut [0]).is_err() {
                        return Ok(());
                    }
                    send(&socket, set, arguments.call)?;
                }
            }
        }
    }
}

/// The other process of `pull`: has memory.
fn memory(arguments: &Arguments) -> io::Result<()> {
    let pool = Pool::new(arguments);
    println!("{}", pool.bytes.as_ptr() as usize);
    io::stdin().read_to_end(&mut Vec::new())?;
    println!("0 0");
    Ok(())
}

/// Sends blocks, several to a call.
fn send(mut socket: &TcpStream, blocks: &[&mut [u8]], call: usize) -> io::Result<()> {
    // Where the next byte lies: in which block, and how far in it.
    let (mut block, mut offset) = (0, 0);
    while block < blocks.len() {
        let mut slices = Vec::with_capacity(64);
        let mut bytes = 0;
        for (index, whole) in blocks[block..].iter().enumerate().take(MOST_BLOCKS) {
            let rest = &whole[if index == 0 { offset } else { 0 }..];
            let rest = &rest[..rest.len().min(call - bytes)];
            bytes += rest.len();
            slices.push(IoSlice::new(rest));
            if bytes == call {
                break;
            }
        }
        offset += socket.write_vectored(&slices)?;
        while block < blocks.len() && offset >= blocks[block].len() {
            offset -= blocks[block].len();
            block += 1;
        }
    }
    Ok(())
}

/// Receives blocks, several to a call.
fn receive(mut socket: &TcpStream, blocks: &mut [&mut [u8]], call: usize) -> io::Result<()> {
    let (mut block, mut offset) = (0, 0);
    while block < blocks.len() {
        let mut slices = Vec::with_capacity(64);
        let mut bytes = 0;
        for (index, whole) in blocks[block..].iter_mut().enumerate().take(MOST_BLOCKS) {
            let rest = &mut whole[if index == 0 { offset } else { 0 }..];
            let most = rest.len().min(call - bytes);
            bytes += most;
            slices.push(IoSliceMut::new(&mut rest[..most]));
            if bytes == call {
                break;
            }
        }
        match socket.read_vectored(&mut slices)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            some => offset += some,
        }
        while block < blocks.len() && offset >= blocks[block].len() {
            offset -= blocks[block].len();
            block += 1;
        }
    }
    Ok(())
}

fn tune(socket: &TcpStream, buffer: usize) -> io::Result<()> {
    socket.set_nodelay(true)?;
    if buffer > 0 {
        // The kernel doubles what it is told, for its own books.
        setsockopt(socket, sockopt::SndBuf, &(buffer / 2))?;
        setsockopt(socket, sockopt::RcvBuf, &(buffer / 2))?;
    }
    Ok(())
}

/// Another process, this program as well; ends when its standard input does.
struct Other {
    process: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Other {
    fn start(what: &str, arguments: &Arguments, port: &str) -> io::Result<Self> {
        let op = if arguments.op == Op::Write { "write" } else { "read" };
        let numbers = [
            ("--block", arguments.block),
            ("--batch", arguments.batch),
            ("--streams", usize::from(arguments.streams)),
            ("--buffer", arguments.buffer),
            ("--call", arguments.call),
        ];
        let mut process = Command::new(std::env::current_exe()?)
            .args([what, "--op", op, "--port", port])
            .args(numbers.iter().flat_map(|(flag, value)| [flag.to_string(), value.to_string()]))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let input = process.stdin.take();
        let output = BufReader::new(process.stdout.take().expect("it was piped"));
        Ok(Self { process, input, output })
    }

    fn line(&mut self) -> io::Result<String> {
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        Ok(line.trim().into())
    }

    /// Lets it end; returns what it says it has used.
    fn end(mut self) -> io::Result<Cpu> {
        self.input = None;
        let line = self.line()?;
        self.process.wait()?;
        let numbers: Vec<f64> = line.split(' ').filter_map(|number| number.parse().ok()).collect();
        match numbers[..] {
            [user, system] => Ok(Cpu { user, system }),
            _ => Err(io::Error::other(format!("the other process said {line:?}"))),
        }
    }
}

/// Starts the target and takes its connections.
fn connect(arguments: &Arguments, streams: usize) -> io::Result<(Other, Vec<TcpStream>)> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    if arguments.buffer > 0 {
        // Accepted sockets inherit it, and the window is negotiated from it.
        setsockopt(&listener, sockopt::RcvBuf, &(arguments.buffer / 2))?;
    }
    let child = Other::start("target", arguments, &listener.local_addr()?.to_string())?;
    let sockets = (0..streams).map(|_| {
        let (mut socket, _) = listener.accept()?;
        tune(&socket, arguments.buffer)?;
        let mut stream = [0];
        socket.read_exact(&mut stream)?;
        Ok((stream, socket))
    });
    let mut sockets = sockets.collect::<io::Result<Vec<_>>>()?;
    sockets.sort_by_key(|(stream, _)| *stream);
    Ok((child, sockets.into_iter().map(|(_, socket)| socket).collect()))
}

/// Buffers of one end: sets of `batch` blocks, in huge pages where the machine has them (as numpy's are).
struct Pool {
    bytes: &'static mut [u8],
    sets: usize,
    batch: usize,
    block: usize,
}

impl Pool {
    fn new(arguments: &Arguments) -> Self {
        let set = arguments.batch * arguments.block;
        let sets = POOL_BYTES.div_ceil(set).clamp(2, 64);
        let length = (sets * set).try_into().expect("a batch of at least one block of at least one byte");
        let flags = if arguments.shared { MapFlags::MAP_SHARED } else { MapFlags::MAP_PRIVATE };
        // SAFETY: a new mapping that nobody else knows; it is never unmapped, so 'static holds.
        let bytes = unsafe {
            let start = mmap_anonymous(None, length, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE, flags)
                .expect("memory for the buffers");
            // Where huge pages are not to be had, small ones serve.
            let _ = madvise(start, length.get(), MmapAdvise::MADV_HUGEPAGE);
            std::slice::from_raw_parts_mut(start.cast::<u8>().as_ptr(), length.get())
        };
        bytes.chunks_mut(64).enumerate().for_each(|(line, bytes)| bytes.fill(line as u8 | 1));
        Self { bytes, sets, batch: arguments.batch, block: arguments.block }
    }

    /// For each stream, for each set: the blocks of that stream, in their order, or in that of the far end.
    fn parts(&mut self, streams: usize, shuffled: bool) -> Vec<Vec<Vec<&mut [u8]>>> {
        let mut parts: Vec<Vec<Vec<&mut [u8]>>> = (0..streams).map(|_| Vec::new()).collect();
        let order: Vec<usize> = if shuffled { order(self.batch) } else { (0..self.batch).collect() };
        for set in self.bytes.chunks_exact_mut(self.batch * self.block) {
            let mut blocks: Vec<Option<&mut [u8]>> = set.chunks_exact_mut(self.block).map(Some).collect();
            parts.iter_mut().for_each(|part| part.push(Vec::new()));
            for (index, &block) in order.iter().enumerate() {
                let of_set = parts[index % streams].last_mut().expect("pushed above");
                of_set.push(blocks[block].take().expect("each block has one place in the order"));
            }
        }
        parts
    }
}

/// The same shuffle in both processes: multiplication by a number that has no factor in common with `batch`.
fn order(batch: usize) -> Vec<usize> {
    let common = |a: usize, b: usize| (1..=a.min(b)).rev().find(|&d| a.is_multiple_of(d) && b.is_multiple_of(d));
    let golden = (batch as f64 * 0.618) as usize;
    let step = (golden.max(1)..).find(|&step| common(step, batch) == Some(1)).expect("primes are without end");
    (0..batch).map(|index| index * step % batch).collect()
}

struct Measured {
    batches: Vec<Duration>,
    all: Duration,
    cpu: Cpu,
}

/// Seconds of CPU: in a process's own code, and in the kernel.
#[derive(Clone, Copy, Default)]
struct Cpu {
    user: f64,
    system: f64,
}

/// Runs the streams batch by batch.
fn measure<W>(arguments: &Arguments, sets: usize, work: Vec<W>) -> io::Result<Measured>
where
    W: FnMut(usize) -> io::Result<()> + Send,
{
    let (barrier, end) = (Barrier::new(work.len()), AtomicUsize::new(usize::MAX));
    let (barrier, end) = (&barrier, &end);
    let before = cpu_seconds()?;
    let (batches, all) = std::thread::scope(|scope| {
        let mut threads = Vec::new();
        for (stream, mut work) in work.into_iter().enumerate() {
            threads.push(scope.spawn(move || {
                // The first round over the sets fills page tables and opens windows: it does not count.
                for set in 0..sets {
                    work(set)?;
                }
                barrier.wait();
                let start = Instant::now();
                let (mut batches, mut last) = (Vec::new(), start);
                for (index, set) in (0..sets).cycle().enumerate() {
                    work(set)?;
                    if stream == 0 && start.elapsed().as_secs_f64() > arguments.seconds {
                        // Before this thread's own wait, so every thread sees it behind theirs: this batch is the last.
                        end.fetch_min(index, Ordering::Relaxed);
                    }
                    barrier.wait();
                    let now = Instant::now();
                    batches.push(now - last);
                    last = now;
                    if index >= end.load(Ordering::Relaxed) {
                        break;
                    }
                }
                Ok::<_, io::Error>((batches, start.elapsed()))
            }));
        }
        let mut results = threads.into_iter().map(|thread| thread.join().expect("no panic"));
        let first = results.next().expect("at least one stream")?;
        results.try_for_each(|result| result.map(drop))?;
        Ok::<_, io::Error>(first)
    })?;
    Ok(Measured { batches, all, cpu: cpu_seconds()?.since(before) })
}

fn report(arguments: &Arguments, measured: &Measured, other: Cpu) -> io::Result<()> {
    let bytes = (measured.batches.len() * arguments.batch * arguments.block) as f64;
    let mut batches: Vec<f64> = measured.batches.iter().map(|time| time.as_secs_f64() * 1e6).collect();
    batches.sort_by(f64::total_cmp);
    let percentile = |percent: usize| batches[(batches.len() * percent / 100).min(batches.len() - 1)];
    let (user, system) = (measured.cpu.user + other.user, measured.cpu.system + other.system);
    let what = arguments.what.to_possible_value().map(|value| value.get_name().to_owned());
    let op = arguments.op.to_possible_value().map(|value| value.get_name().to_owned());
    let line = serde_json::json!({
        "what": what, "op": op, "block": arguments.block, "batch": arguments.batch, "streams": arguments.streams,
        "buffer": arguments.buffer, "call": arguments.call, "batches": batches.len(),
        "gbps": bytes / measured.all.as_secs_f64() / 1e9, "p50_us": percentile(50), "p99_us": percentile(99),
        "cpu_s_per_gb": (user + system) / bytes * 1e9, "system_s_per_gb": system / bytes * 1e9,
    });
    println!("{line}");
    Ok(())
}

/// Seconds of CPU that this process has used. The kernel counts them in ticks of 10 ms.
fn cpu_seconds() -> io::Result<Cpu> {
    let stat = std::fs::read_to_string("/proc/self/stat")?;
    // Behind the program's name, which may contain anything: fields 3 and following; 14 and 15 are user and system.
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    let ticks = |field: usize| fields.get(field - 3).and_then(|text| text.parse::<f64>().ok());
    let seconds = ticks(14).zip(ticks(15)).map(|(user, system)| Cpu { user: user / 100.0, system: system / 100.0 });
    seconds.ok_or_else(|| io::Error::other("/proc/self/stat is not what it was"))
}

impl Cpu {
    fn since(self, before: Self) -> Self {
        Self { user: self.user - before.user, system: self.system - before.system }
    }
}
