use spanker_model::{Quant, builtin};
use spanker_plan::*;
use spanker_topology::*;
fn main(){
 let model=builtin("llama-2-70b",Quant::Q4_0).unwrap();
 let n:usize=std::env::args().nth(1).unwrap().parse().unwrap();
 let c=Cluster::uniform(Profile::builtin("rev-a").unwrap(),n,Shape::Ring).unwrap();
 let cards:Vec<usize>=(0..n).collect();
 let ch=choose(&model,&c,&cards,&Request::new(Objective::Latency)).unwrap();
 for x in &ch.candidates { println!("{:?} ways {} stages {} fits {} token {:?} terms {:?} mem0 {:?}", x.strategy, x.layout.tensor_ways(), x.layout.pipeline_stages(), x.prediction.fits(), x.prediction.token, x.prediction.terms, x.prediction.memory[0]);
 let p=Plan::new(model.clone(),c.clone(),Request::new(Objective::Latency),x.layout.clone()).unwrap();
 let a=p.allocations(); println!("{:?}", a[0].1.iter().filter(|x|x.bytes.0>20_000_000).map(|x|(x.name.clone(),x.bytes.0>>20)).collect::<Vec<_>>());
 println!("{:?}", p.exchanges()[0]);
 }
}
