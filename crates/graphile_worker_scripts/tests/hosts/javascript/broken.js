module.exports = async ( => {
