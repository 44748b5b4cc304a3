use super::Bench;
use crate::Failure;
use crate::report::Section;

pub(super) async fn measure(_bench: &Bench) -> Result<Section, Failure> {
    Err("not yet".into())
}
