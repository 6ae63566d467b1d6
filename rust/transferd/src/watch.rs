//! `transferd watch-key`: what opens the daemons' HTTP beyond loopback.

use std::path::PathBuf;

use transfer::error::Error;
use transfer::keys::watch_key;

use crate::settings::session_key;

/// Flags.
#[derive(clap::Args, Debug)]
pub struct Arguments {
    /// The file that one of the daemons is started with
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// The cluster's secret
    #[arg(long, value_name = "FILE")]
    secret_file: Option<PathBuf>,
}

/// Prints it.
pub fn run(arguments: &Arguments) -> Result<(), Error> {
    let session = session_key(arguments.config.as_deref(), arguments.secret_file.as_deref())?;
    println!("{}", watch_key(&session)?);
    Ok(())
}
