//! Languages: the extensions of their files, the program that runs their host, and its minimum version.

use super::HostOptions;
use super::process::START_TIMEOUT;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;

const NODE_HOST: &str = include_str!("node.cjs");
const PYTHON_HOST: &str = include_str!("python.py");

/// Start the built-in hosts: they read the host's source from the socket and run it. This keeps the command line short for
/// process lists, and needs no file on disk. `LENGTH` stands for the number of bytes.
const NODE_BOOTSTRAP: &str = "{const fs=require('node:fs'),source=Buffer.alloc(LENGTH);\
for(let at=0,n;at<LENGTH;at+=n)if(!(n=fs.readSync(+process.env.GRAPHILE_WORKER_HOST_FD,source,at,LENGTH-at)))process.exit(1);\
(0,eval)(source+'//# sourceURL=[eval]')}";
const PYTHON_BOOTSTRAP: &str = "import os,socket,sys
s=socket.socket(fileno=os.dup(int(os.environ['GRAPHILE_WORKER_HOST_FD'])))
source=s.recv(LENGTH,socket.MSG_WAITALL)
s.close()
if len(source)<LENGTH: sys.exit(1)
exec(compile(source,'<graphile-worker host>','exec'),{'__name__':'__main__'})";

/// The oldest versions that can run the built-in hosts.
const LOWEST_NODE: [u32; 2] = [18, 0];
const LOWEST_PYTHON: [u32; 2] = [3, 9];

/// The folder of a project's virtual environment.
const VIRTUAL_ENVIRONMENT: &str = ".venv";

/// A language that task files are written in.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum Language {
    /// JavaScript, and TypeScript if Node supports stripping its types.
    JavaScript,
    Python,
    /// A language with a custom host.
    Other(Arc<OtherLanguage>),
}

/// A language whose host the application provides.
#[derive(Debug, PartialEq, Eq, Hash)]
pub(crate) struct OtherLanguage {
    pub(crate) name: String,
    pub(crate) extensions: Vec<String>,
    pub(crate) command: Vec<String>,
}

impl Language {
    pub(crate) fn name(&self) -> &str {
        match self {
            Language::JavaScript => "JavaScript",
            Language::Python => "Python",
            Language::Other(other) => &other.name,
        }
    }

    /// The extensions of its files, without the dot, in order of precedence.
    pub(crate) fn extensions(&self) -> Vec<&str> {
        match self {
            Language::JavaScript => vec!["js", "cjs", "mjs", "ts", "mts"],
            Language::Python => vec!["py"],
            Language::Other(other) => other.extensions.iter().map(String::as_str).collect(),
        }
    }

    /// The source of its host, which the program reads from the socket. Empty for a custom host.
    pub(crate) fn source(&self) -> &'static str {
        match self {
            Language::JavaScript => NODE_HOST,
            Language::Python => PYTHON_HOST,
            Language::Other(_) => "",
        }
    }

    /// The program and arguments that start its host. Checks first that the program exists and is recent enough.
    pub(crate) async fn command(&self, options: &HostOptions, tasks_dir: &Path) -> Result<Vec<String>, String> {
        match self {
            Language::JavaScript => {
                let program = options.node.clone().unwrap_or_else(|| PathBuf::from("node"));
                let version = checked_version("Node", &program, LOWEST_NODE, "(`--node`, `HostOptions::node`)").await?;
                let mut command = vec![program.to_string_lossy().into_owned()];
                if needs_strip_types(version) {
                    command.push("--experimental-strip-types".to_owned());
                }
                // `NODE_OPTIONS` may set the input type to modules.
                command.push("--input-type=commonjs".to_owned());
                command.extend(["--eval".to_owned(), bootstrap(NODE_BOOTSTRAP, NODE_HOST)]);
                Ok(command)
            }
            Language::Python => {
                let program = options.python.clone().unwrap_or_else(|| python_of(tasks_dir));
                checked_version("Python", &program, LOWEST_PYTHON, "(`--python`, `HostOptions::python`)").await?;
                let bootstrap = bootstrap(PYTHON_BOOTSTRAP, PYTHON_HOST);
                Ok(vec![program.to_string_lossy().into_owned(), "-c".to_owned(), bootstrap])
            }
            Language::Other(other) => Ok(other.command.clone()),
        }
    }
}

fn bootstrap(program: &str, source: &str) -> String {
    program.replace("LENGTH", &source.len().to_string())
}

/// The Python of the active virtual environment, of the project's, or on the PATH, in this order.
fn python_of(tasks_dir: &Path) -> PathBuf {
    let active = std::env::var_os("VIRTUAL_ENV").filter(|folder| !folder.is_empty()).map(PathBuf::from);
    let projects = tasks_dir.ancestors().skip(1).map(|folder| folder.join(VIRTUAL_ENVIRONMENT));
    active
        .into_iter()
        .chain(projects)
        .map(|folder| folder.join("bin").join("python"))
        .find(|program| program.exists())
        .unwrap_or_else(|| PathBuf::from("python3"))
}

/// These versions of Node strip types only if the flag is set.
fn needs_strip_types(version: [u32; 2]) -> bool {
    ([22, 6]..[22, 18]).contains(&version) || ([23, 0]..[23, 6]).contains(&version)
}

/// The version of a program. Fails if the program does not exist or is too old.
async fn checked_version(name: &str, program: &Path, lowest: [u32; 2], option: &str) -> Result<[u32; 2], String> {
    let asked = tokio::process::Command::new(program).arg("--version").stdin(Stdio::null()).kill_on_drop(true).output();
    let Ok(asked) = tokio::time::timeout(START_TIMEOUT, asked).await else {
        return Err(format!("`{} --version` did not exit within {START_TIMEOUT:?}", program.display()));
    };
    let output = match asked {
        Ok(output) => output,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            let searched = if program.components().count() > 1 { "does not exist" } else { "is not on the PATH" };
            return Err(format!("`{}` {searched}: install {name}, or set its path {option}", program.display()));
        }
        Err(error) => return Err(format!("`{}` cannot be started: {error}", program.display())),
    };
    let text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    let Some(version) = read_version(&text) else {
        // Standard error has the reason, such as an unknown option or a missing library.
        let printed = format!("{text}\n{}", String::from_utf8_lossy(&output.stderr));
        let printed = printed.trim();
        return Err(format!("`{} --version` printed {printed:?}, expected the version of {name}", program.display()));
    };
    if version < lowest {
        let [major, minor] = lowest;
        return Err(format!("`{}` is {text}, expected {name} {major}.{minor} or later", program.display()));
    }
    Ok(version)
}

/// Reads `v20.1.0` and `Python 3.11.7`.
fn read_version(text: &str) -> Option<[u32; 2]> {
    let mut numbers = text.trim_start_matches(|c: char| !c.is_ascii_digit()).split('.').map(str::parse);
    Some([numbers.next()?.ok()?, numbers.next()?.ok()?])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_in_the_format_of_each_program() {
        assert_eq!(read_version("v20.20.2"), Some([20, 20]));
        assert_eq!(read_version("Python 3.11.7"), Some([3, 11]));
        assert_eq!(read_version("Python 3.14.0rc1"), Some([3, 14]));
        assert_eq!(read_version("command not found"), None);
    }

    #[test]
    fn the_flag_for_type_stripping_is_set_only_for_versions_that_need_it() {
        let asked: Vec<[u32; 2]> = [[20, 20], [22, 5], [22, 6], [22, 17], [22, 18], [23, 0], [23, 5], [23, 6], [24, 1]]
            .into_iter()
            .filter(|version| needs_strip_types(*version))
            .collect();
        assert_eq!(asked, [[22, 6], [22, 17], [23, 0], [23, 5]]);
    }

    #[tokio::test]
    async fn the_error_names_a_program_that_is_missing_or_unsuitable() {
        let missing =
            checked_version("Node", Path::new("no-such-node"), LOWEST_NODE, "(`--node`, `HostOptions::node`)").await;
        assert_eq!(
            missing.expect_err("no such program"),
            "`no-such-node` is not on the PATH: install Node, or set its path (`--node`, `HostOptions::node`)"
        );
        let other = checked_version("Node", Path::new("/bin/true"), LOWEST_NODE, "").await;
        assert!(other.expect_err("not Node").ends_with("expected the version of Node"));
        let old = checked_version("Python", Path::new("python3"), [99, 0], "").await.expect_err("too old");
        assert!(old.ends_with("expected Python 99.0 or later"), "{old}");
    }
}
