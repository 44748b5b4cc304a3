//! What a command prints on standard output.

use crate::failure::Failure;
use std::io::{ErrorKind, Write};

/// Prints this. Where nobody reads any more (`… | head`), the program ends without a word.
pub(crate) fn print(text: &str) -> Result<(), Failure> {
    let mut stdout = std::io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Err(Failure::Said),
        Err(error) => Err(format!("could not write to standard output: {error}").into()),
        Ok(()) => Ok(()),
    }
}

/// Prints a line.
pub(crate) fn print_line(text: &str) -> Result<(), Failure> {
    print(&format!("{text}\n"))
}
