//! `transferd topology`: which network cards serve which memory.

use std::path::PathBuf;

use transfer::error::Error;
use transfer::transport::rdma::topology::describe;

/// Flags.
#[derive(clap::Args, Debug)]
pub struct Arguments {
    /// A file that says which cards are near which memory, in place of what the system says
    #[arg(long, value_name = "FILE")]
    overrides: Option<PathBuf>,
    /// The entry of every port's GID table to use; RoCE v2 over IPv4 first, if not given
    #[arg(long, value_name = "N")]
    gid_index: Option<u8>,
}

/// Prints the ports, and for each kind of memory the ports to use.
pub fn run(arguments: &Arguments) -> Result<(), Error> {
    print!("{}", describe(arguments.overrides.as_deref(), arguments.gid_index)?);
    Ok(())
}
