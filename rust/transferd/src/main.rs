//! The standalone transfer daemon: one node's KV pool and its links.

fn main() {
    std::process::exit(transferd::run(std::env::args_os().skip(1)));
}
